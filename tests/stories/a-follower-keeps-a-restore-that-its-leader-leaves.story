# A and B share a prefix on the host that is being restored for A. A is aborted; the copy
# goes on for B and its pages are B's.

world ranks=2 page=4 device=16 host=8
config write=none persist=off
ports held copies

prompt A pages=5
prompt B from=A[0:4] pages=6
put A[0:4] in host

submit A
tick 6
submit B
tick 6
expect A filling
expect B filling
abort A
expect within 6 ticks A aborted
tick 4
expect B not failed
land all
expect within 16 ticks B ready
expect B bytes ok
run B
tick
finish B
expect within 10 ticks B done
tick 6
expect ranks agree
expect idle
