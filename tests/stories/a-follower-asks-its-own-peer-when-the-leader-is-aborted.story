# B follows A's transfer of the pages they share. A is aborted in the middle of it, so B
# asks the prefill node itself, and gets right bytes.

world ranks=2 page=4 device=16 host=8
config write=none persist=off
ports held peer

prompt A pages=4
prompt B from=A[0:4] pages=6

submit A
tick 6
expect A filling
submit B
tick 6
expect B filling
land peer A pages=2
tick 2
abort A
expect within 6 ticks A aborted
tick 2
expect B not failed
ports auto
expect within 16 ticks B ready
expect B bytes ok
expect peer told abort A
run B
tick
finish B
expect within 10 ticks B done
tick 6
expect ranks agree
expect idle
