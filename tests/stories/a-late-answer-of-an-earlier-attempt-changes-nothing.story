# A request is aborted in the middle of a read and submitted again. The answer of its first
# attempt arrives in the middle of the second one, and is nobody's.

world ranks=1 page=4 device=16 host=8
config write=none persist=off prefetch=wait_complete
ports held store

prompt A pages=6
put A[0:4] in storage

submit A
tick 8
expect A filling
abort A
expect within 6 ticks A aborted
submit A
tick 8
expect A filling
late store A
tick 4
expect A filling|ready
expect tier host free=4
land store A
expect within 12 ticks A ready
expect A bytes ok
run A
tick
finish A
expect within 10 ticks A done
tick 6
expect idle
