# B and C wait for the same room. C came later and has the higher priority.

world ranks=2 page=4 device=4 host=8
config write=none persist=off

prompt A pages=4
prompt B pages=3
prompt C pages=3

submit A
expect within 8 ticks A ready
run A
submit B
tick 2
submit C priority=1
tick 4
expect B queued
expect C queued
finish A
expect within 8 ticks C ready
expect B queued
