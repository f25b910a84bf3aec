# A request is aborted in the middle of a read, and the read then brings two of four pages.
# What came may be kept on the host or dropped; what did not come is not believed to be
# there.

world ranks=2 page=4 device=16 host=8
config write=none persist=off prefetch=wait_complete
ports held store

prompt A pages=5
put A[0:4] in storage

submit A
tick 8
expect A filling
abort A
expect within 6 ticks A aborted
land store A pages=2 rank=1
land store A rank=0
tick 4
lose A[2:4] from storage
expect A hit device=0 host<=2
expect idle
ports auto

submit A
tick 8
expect within 4 ticks A ready
expect A sources device=0 peer=3
expect A bytes ok
expect ranks agree
