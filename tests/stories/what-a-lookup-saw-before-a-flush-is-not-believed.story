# A lookup of B has found A's pages in storage; storage is flushed before the ranks agree on it, and
# A's pages join the index meanwhile. They are not taken for stored: they are written at the end.
world page=4 device=16 host=0
config write=none persist=on
prompt A pages=2
prompt B from=A[0:2] pages=2
put A[0:2] in storage
ports held peer
submit A
tick 4
land peer A
submit B
tick
flush all
tick
expect B filling
ports auto
expect within 8 ticks A ready
run A
expect within 8 ticks B ready
run B
tick
finish A
finish B
tick 8
expect store has A[0:2]
expect idle
