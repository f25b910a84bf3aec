# Pages that a live request receives are put in the cache beside it.

world ranks=2 page=4 device=16 host=16
config write=none persist=off
ports held peer

prompt A pages=4
submit A
tick 6
expect A filling
put A[0:4] in device
put A[0:4] in host
tick 2
land peer A
expect within 6 ticks A ready
expect A bytes ok
run A
tick
finish A
expect within 8 ticks A done
tick 4
expect tier device cached=4 free=12
expect idle
