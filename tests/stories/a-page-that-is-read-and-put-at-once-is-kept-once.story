# While two pages are read from storage for A, the same two find a place on the host. One copy is
# kept, and the host pages of the other are free again.

world ranks=2 page=4 device=16 host=8
config write=none persist=off
ports held store

prompt A pages=4
put A[0:2] in storage

submit A
tick 4
expect A sources storage=2 peer=2
put A[0:2] in host
land store A
expect within 6 ticks A ready
tick
expect A bytes ok
expect tier host cached=2 free=6
