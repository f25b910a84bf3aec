# `flush all` forgets the device, the host and storage.

world ranks=2 page=4 device=16 host=16
config write=through persist=on

prompt A pages=4
submit A
expect within 12 ticks A ready
run A
tick
finish A
expect within 10 ticks A done
tick 10
expect store has A
expect A hit device=4 host=0 storage=0
flush all
tick 2
expect A hit device=0 host=0 storage=0
expect store lacks A
expect tier device free=16
expect tier host free=16
expect idle
