# B waits for room and knows that storage has two of its pages. Storage is detached before B's
# turn comes, so B asks the prefill node for everything.

world ranks=2 page=4 device=4 host=8
config write=none persist=off

prompt A pages=4
prompt B pages=4
put B[0:2] in storage

submit A
expect within 12 ticks A ready
run A
submit B
tick 4
expect B queued
detach storage
tick 2
finish A
expect within 6 ticks A done
expect within 12 ticks B ready
expect B sources storage=0 peer=4
expect count reads B 0
expect B bytes ok
