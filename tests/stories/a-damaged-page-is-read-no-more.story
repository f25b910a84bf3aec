# A stored page is damaged. It is read at most twice for the request that finds it, and
# not at all for the next one.

world ranks=2 page=4 device=32 host=16
config write=none persist=off prefetch=wait_complete

prompt A pages=5
prompt B from=A[0:4] pages=6
put A[0:4] in storage
corrupt A[1] in storage rank=1

submit A
expect within 20 ticks A ready
expect A sources device=0 host=0 storage=1 peer=4
expect A bytes ok
expect count reads A <=2
run A
tick
finish A
expect within 10 ticks A done
flush device
flush host
tick 4
submit B
expect within 20 ticks B ready
expect B sources device=0 host=0 storage=1 peer=5
expect count reads B <=1
expect B bytes ok
