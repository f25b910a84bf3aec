# A damaged page is read at most twice for one request.

world ranks=2 page=4 device=32 host=16
config write=none persist=off
prompt A pages=6
prompt B from=A[0:5] pages=7
put A[0:5] in storage
corrupt A[0] in storage
truncate A[3] in storage rank=1
submit A
expect within 20 ticks A ready
expect A sources storage=0 peer=6
expect A bytes ok
expect count reads A <=2
submit B
expect within 20 ticks B ready
expect B bytes ok
expect count reads B <=1
expect count lookups A <=2
