# A's pages on the host are needed for its restore: the read behind them has only the other two.

world ranks=2 page=4 device=16 host=4
config write=none persist=off

prompt A pages=6
prompt B pages=2
put A[0:2] in host
put B[0:2] in host
put A[0:6] in storage

submit A
expect within 12 ticks A ready
expect A sources host=2 storage=2 peer=2
expect A promise=4
expect A bytes ok
