# The prefill node has given A all that was asked of it, and dies while A's restore runs. A goes on.

world ranks=2 page=4 device=16 host=8
config write=none persist=off
ports held copies

prompt A pages=4
put A[0:2] in host

submit A
tick 6
expect A filling
kill peer
tick 4
expect A not failed
land all
expect within 6 ticks A ready
expect A bytes ok
