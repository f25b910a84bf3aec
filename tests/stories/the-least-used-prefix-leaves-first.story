# With eviction=lfu the prefix that was used twice stays, although the other one was used
# later.

world ranks=1 page=4 device=6 host=4
config write=none persist=off eviction=lfu

prompt A pages=2
prompt B pages=2
prompt C pages=3

submit A
expect within 10 ticks A ready
run A
tick
finish A
expect within 10 ticks A done
submit A                           # again: a new attempt of the same id
expect within 10 ticks A ready
expect A sources device=2 host=0 storage=0 peer=0
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
tick 2
expect tier device free=2 cached=4

submit C                           # one page more than is free
expect within 10 ticks C ready
expect A hit device=2 host=0 storage=0
expect B hit device=1 host=0 storage=0
