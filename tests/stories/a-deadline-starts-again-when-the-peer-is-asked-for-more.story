# transfer_deadline_ms is time without progress and starts again at each widening.

world ranks=2 page=4 device=16 host=8
config write=none persist=off transfer_deadline_ms=1000
ports held
prompt A pages=8
put A[0:4] in storage
submit A
tick 6
advance 800ms
land peer A pages=1
tick 3
advance 800ms
land store A pages=1
tick
land copies A
tick 4
expect A wants 1:8
advance 800ms
tick 4
expect A filling
advance 400ms
expect within 6 ticks A failed
