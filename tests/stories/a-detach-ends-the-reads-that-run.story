# Storage is detached while it is read for A, and says nothing more. A does not wait for it.

world ranks=2 page=4 device=16 host=8
config write=none persist=off prefetch=wait_complete
ports held store

prompt A pages=6
put A[0:4] in storage

submit A
tick 4
expect A sources storage=4 peer=2
detach storage
expect within 8 ticks A ready
expect A sources storage=0 peer=6
expect A bytes ok
