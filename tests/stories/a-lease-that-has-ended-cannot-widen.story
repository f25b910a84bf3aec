# Storage was promised four pages and brings two. The prefill node's lease has ended
# meanwhile, so that it cannot give the other two: only now the request fails.

world ranks=2 page=4 device=16 host=8
config write=none persist=off prefetch=wait_complete
ports held store

prompt A pages=6
put A[0:4] in storage

submit A
tick 8
expect A filling
expect A wants 4:6
expire peer A
tick 4
expect A filling                   # nothing more is needed so far
land store A pages=2
expect within 14 ticks A failed
expect A error contains "prefill"
tick 6
expect tier host free=6 cached=2 reserved=0
expect ranks agree
expect idle
