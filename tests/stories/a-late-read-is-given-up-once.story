# With best_effort a read is given up when everything else is here, once, and the tick ends.
world ranks=2 page=4 device=16 host=8
config prefetch=best_effort
ports held store copies
prompt A pages=4
put A[0:3] in storage
submit A
expect within 6 ticks A filling
expect within 4 ticks effects CancelPrefetch=1
tick
expect effects CancelPrefetch=0
expect within 6 ticks A ready
expect A sources peer=4
expect A bytes ok
land store A
run A
tick
finish A
ports auto
expect within 10 ticks idle
