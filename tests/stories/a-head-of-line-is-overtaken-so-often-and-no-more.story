# A large request waits at the head of the queue. Small ones may overtake it twice; the
# third one waits behind it, or the large one would starve.

world ranks=1 page=4 device=8 host=4
config write=none persist=off bypass_max=2

prompt A pages=4
prompt B pages=8
prompt C pages=1
prompt D pages=1
prompt E pages=1

submit A
expect within 10 ticks A ready
run A
tick
submit B                           # needs the whole device
tick 4
expect B queued
submit C
expect within 8 ticks C ready
submit D
expect within 8 ticks D ready
submit E
tick 8
expect E queued
expect B queued

run C
run D
tick
finish A
finish C
finish D
expect within 14 ticks B ready
expect E queued
expect B bytes ok
run B
tick
finish B
expect within 14 ticks E ready
