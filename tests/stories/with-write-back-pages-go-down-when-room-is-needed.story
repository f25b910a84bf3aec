# With write=back a finished prompt stays on the device alone. Its pages are copied down
# before another request takes their place, and are found on the host afterwards.

world ranks=2 page=4 device=8 host=16
config write=back persist=off

prompt A pages=4
prompt B pages=8

submit A
expect within 10 ticks A ready
run A
tick 4
expect tier host free=16 cached=0
finish A
expect within 10 ticks A done
tick 4
expect tier device cached=4
expect idle

submit B
expect within 20 ticks B ready
expect B bytes ok
expect A hit device=0 host=4 storage=0
run B
tick
finish B
expect within 10 ticks B done
tick 10
expect ranks agree
