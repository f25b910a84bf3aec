# One restore at a time is allowed; the second one starts when the first has landed. With
# the limit raised in mid-story both run side by side.

world ranks=2 page=4 device=32 host=16
config write=none persist=off restores_in_flight_max=1
ports held copies

prompt A pages=3
prompt B pages=3
prompt C pages=3
prompt D pages=3
put A in host
put B in host
put C in host
put D in host

submit A
submit B
tick 6
land copies A
tick 4
expect A ready
land copies B
expect within 4 ticks B ready

config restores_in_flight_max=4
submit C
submit D
tick 6
land copies D
expect within 4 ticks D ready
expect C filling
land copies C
expect within 4 ticks C ready
expect ranks agree
