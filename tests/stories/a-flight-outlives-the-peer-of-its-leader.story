# B follows A's restore. The connection to A's prefill node is lost, so A fails; the restore is B's,
# whose own prefill node is asked for no page of it.

world ranks=2 page=4 device=16 host=8
config write=none persist=off
ports held copies
ports held peer

prompt A pages=5
prompt B from=A[0:4] pages=6
put A[0:4] in host

submit A
tick 4
submit B
tick 4
expect B sources device=4 host=0 peer=2
fail peer A
tick 2
expect A failed
expect B sources device=0 host=4 peer=2
land copies A
land peer B
expect within 6 ticks B ready
expect B promise=4
expect B wants 4:6
expect B bytes ok
run B
finish B
ports auto
tick 8
expect idle
