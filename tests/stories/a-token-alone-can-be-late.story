# The first token has a deadline of its own.

world ranks=2 page=4 device=16 host=8
config write=none persist=off transfer_deadline_ms=500
prompt A pages=4
put A in device
silence peer
submit A
tick 6
expect A filling
advance 600ms
expect within 6 ticks A failed
expect A error contains "prefill"
tick 4
expect tier device draining=0
kill peer
expect within 6 ticks idle
