# With some room on the host the read is partial, and the promise says so.

world ranks=2 page=4 device=16 host=3
config write=none persist=off

prompt A pages=6
put A[0:5] in storage
submit A
expect within 12 ticks A ready
expect A bytes ok
expect A promise=3
expect A sources device=0 host=0 storage=3 peer=3
