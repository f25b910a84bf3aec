# B's first page is A's. Its write fails, and it is flushed while B uses it, so nobody can write it
# any more. B's second page is not written either: behind a hole nobody would find it.

world ranks=2 page=4 device=16 host=8
config write=none persist=on
ports held writes peer

prompt A pages=3
prompt B from=A[0:1] pages=2

submit A
tick 6
land peer A
expect within 8 ticks A ready
run A
tick
finish A
tick
submit B
tick 6
expect B filling
flush device
tick
land peer B
expect within 8 ticks B ready
run B
fail writes
tick 2
finish B
tick
ports auto
tick 6
expect store lacks B[0]
expect store lacks B[1]
expect idle
