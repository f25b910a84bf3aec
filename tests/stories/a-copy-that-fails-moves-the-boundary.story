# A restore fails on one rank. Both ranks ask the peer for its pages at once; the copy
# isn't tried again from the host.

world ranks=2 page=4 device=16 host=8
config write=none persist=off
ports held copies

prompt A pages=6
put A[0:4] in host

submit A
tick 8
expect A filling
fail copies A rank=1
tick 4
land copies A rank=0
expect within 14 ticks A ready
expect A sources device=0 host=0 storage=0 peer=6
expect A wants 0:6
expect A bytes ok
expect ranks agree
run A
tick
finish A
expect within 10 ticks A done
tick 6
expect idle
