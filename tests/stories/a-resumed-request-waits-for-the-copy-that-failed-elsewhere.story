# A comes back after a retraction. Its restore fails on rank 0 and still writes on rank 1, so A is
# not run on those pages yet.

world ranks=2 page=4 device=8 host=8
config write=none persist=off

prompt A pages=2

submit A
expect within 8 ticks A ready
run A
tick
retract A
tick 6
flush device
ports held copies
resume A
tick 4
expect A filling
fail copies A rank=0
tick 2
expect A filling
land all
expect within 4 ticks A ready
expect A sources host=0 recompute=2
