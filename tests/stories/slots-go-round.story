# A ballot has eight slots, and four prefill nodes are slow: what is open for their requests would
# fill the slots for ever. E is voted on all the same.

world ranks=2 page=4 device=16 host=8
config write=none persist=off ballot_slots=8
ports held peer

prompt A pages=1
prompt B pages=1
prompt C pages=1
prompt D pages=1
prompt E pages=4
put E[0:2] in host

submit A
submit B
submit C
submit D
tick 6
expect D filling
submit E
tick 12
expect E filling
land peer E
expect within 12 ticks E ready
expect E bytes ok
