# B waits for room. Storage was asked for what lies behind B's pages on the host; when these leave
# the host meanwhile, storage is asked for them as well.

world ranks=2 page=4 device=4 host=8
config write=none persist=off

prompt A pages=4
prompt B pages=4
put B[0:2] in host
put B[0:4] in storage

submit A
expect within 12 ticks A ready
run A
submit B
tick 4
expect B queued
expect count lookups B 1
flush host
tick 4
finish A
expect within 6 ticks A done
expect within 12 ticks B ready
expect B sources host=0 storage=4 peer=0
expect count lookups B 2
expect B bytes ok
