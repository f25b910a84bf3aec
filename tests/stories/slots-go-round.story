# A ballot has two slots, and A's prefill node is slow: what is open for A would fill them for ever.
# B is voted on all the same.

world ranks=2 page=4 device=16 host=8
config write=none persist=off ballot_slots=2
ports held peer

prompt A pages=4
prompt B pages=4
put B[0:2] in host

submit A
tick 6
expect A filling
submit B
tick 12
expect B filling
land peer B
expect within 12 ticks B ready
expect B bytes ok
