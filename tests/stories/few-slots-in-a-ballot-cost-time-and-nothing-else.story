# A ballot speaks of eight tickets at most. Four requests have more open than that; their
# news waits for its turn, and all of them get ready.

world ranks=2 page=4 device=32 host=16
config write=through persist=on ballot_slots=8

prompt A pages=4
prompt B pages=4
prompt C pages=4
prompt D pages=4
put A[0:2] in host
put B[0:2] in storage
put C[0:1] in host
put C[1:3] in storage

submit A
submit B
submit C
submit D
tick 3
expect ballots 1
expect within 30 ticks A ready
expect within 30 ticks B ready
expect within 30 ticks C ready
expect within 30 ticks D ready
expect A bytes ok
expect B bytes ok
expect C bytes ok
expect D bytes ok
run A
run B
run C
run D
tick
finish A
finish B
finish C
finish D
expect within 40 ticks idle
expect store has D
expect ranks agree
