# Two ticks from the answer of the look-up to the promise, two from the last landing to ready.

world ranks=2 page=4 device=16 host=16
config write=none persist=off
ports held

prompt A pages=6
put A[0:4] in host
submit A
tick 4
expect A filling
expect A promise=4
land all
tick 2
expect A ready
