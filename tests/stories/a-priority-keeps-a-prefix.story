# With eviction=priority the prefix of the request with priority stays.

world ranks=1 page=4 device=6 host=4
config write=none persist=off eviction=priority

prompt A pages=2
prompt B pages=2
prompt C pages=4
submit A priority=5
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
submit C
expect within 10 ticks C ready
expect A hit device=2
expect B hit device=0
