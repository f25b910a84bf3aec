# With its output it is longer than the device.

world ranks=1 page=4 device=8 host=8
prompt A pages=6
submit A output=3
expect A failed
expect A error contains "8"
submit A output=2
expect within 10 ticks A ready
