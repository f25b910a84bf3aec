# With write-back, dirty pages whose copy failed are forgotten when somebody needs their room.

world ranks=2 page=4 device=6 host=6
config write=back persist=off

prompt A pages=5
prompt B pages=4

submit A
expect within 10 ticks A ready
run A
tick
finish A
ports held writes
submit B
tick 4
expect B queued
fail writes
expect within 6 ticks B ready
expect B bytes ok
