# Equal tokens of two tenants come at the same time: neither waits for the pages of the other.

world ranks=2 page=4 device=16 host=8
config write=none persist=off
ports held peer

prompt A pages=4 tenant=blue
prompt B like=A tenant=green

submit A
submit B
tick 4
expect A filling
expect B filling
expect B sources device=0 peer=4
expect B promise=0
expect B wants 0:4
ports auto
expect within 6 ticks A ready
expect within 6 ticks B ready
expect A bytes ok
expect B bytes ok
