# With best_effort a read is given up when the other parts of the request have landed.

world ranks=2 page=4 device=16 host=8
config write=none persist=off prefetch=best_effort
ports held store peer

prompt A pages=6
put A[0:4] in storage
submit A
tick 6
expect A filling
expect A promise=4
expect A wants 4:6
land peer A
tick 4
expect A wants 0:6
land peer A
expect within 6 ticks A ready
expect A sources storage=0 peer=6
expect A bytes ok
expect tier host free=4
land store A
tick 4
expect tier host draining=0 reserved=0
