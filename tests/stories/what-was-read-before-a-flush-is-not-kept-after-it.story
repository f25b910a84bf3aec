# The host is flushed while pages are read for A. A gets them, and the host does not keep them.

world ranks=2 page=4 device=16 host=8
config write=none persist=off
ports held store

prompt A pages=4
put A[0:2] in storage

submit A
tick 4
expect A sources storage=2 peer=2
flush host
tick
land store A
expect within 6 ticks A ready
expect A sources storage=2 peer=2
tick
expect A bytes ok
expect tier host cached=0 free=8
