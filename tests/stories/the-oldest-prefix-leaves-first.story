# With eviction=fifo the prefix that came first goes first, however often it was used.

world ranks=1 page=4 device=6 host=4
config write=none persist=off eviction=fifo

prompt A pages=2
prompt B pages=2
prompt C pages=3

submit A
expect within 10 ticks A ready
run A
tick
finish A
expect within 10 ticks A done
submit B
expect within 10 ticks B ready
run B
tick
finish B
expect within 10 ticks B done
submit A
expect within 10 ticks A ready
run A
tick
finish A
expect within 10 ticks A done
tick 2

submit C
expect within 10 ticks C ready
expect A hit device=1 host=0 storage=0
expect B hit device=2 host=0 storage=0
