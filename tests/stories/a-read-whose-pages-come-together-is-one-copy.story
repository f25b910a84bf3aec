# What a read brings is restored in one copy, and host pages in front of it in another one,
# since they could be restored earlier.

world ranks=2 page=4 device=16 host=16
config write=none persist=off
ports held store

prompt A pages=6
put A[0:2] in host
put A[2:5] in storage

submit A
tick 6
expect A filling
land store A
tick
expect effects StartRestore=1
expect within 4 ticks A ready
expect A sources device=0 host=2 storage=3 peer=1
expect A bytes ok
