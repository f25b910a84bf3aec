# With best effort a read is given up when all else is here. What a leader still brings is not here.

world page=4 device=16 host=8
config write=none persist=off prefetch=best_effort
ports held

prompt A pages=2
prompt B from=A[0:2] pages=4

submit A
tick 4
put B in storage                     # A has not found it there
submit B
tick 4
expect B sources device=2 storage=2 peer=0
tick 3                               # its first token comes, and all else but A's pages
expect B sources device=2 storage=2 peer=0
land store B
land peer A
ports auto
expect within 8 ticks B ready
expect B sources device=2 storage=2 peer=0
expect B bytes ok
