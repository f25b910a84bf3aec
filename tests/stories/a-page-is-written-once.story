# A's pages are being written to storage when B, which begins with them, ends. B's page waits for
# them, and they are not written a second time.

world ranks=2 page=4 device=16 host=8
config write=none persist=on
ports held writes

prompt A pages=3
prompt B from=A[0:3] pages=4

submit A
expect within 8 ticks A ready
run A
tick
finish A
tick
submit B
expect within 8 ticks B ready
run B
tick
finish B
tick
expect effects StartPersist=0
ports auto
tick 8
expect store has B[0:4]
expect idle
