# The worker restarts in mid-transfer. The old request is over, the peer has heard it, and
# the same id is served again.

world ranks=2 page=4 device=16 host=8
config write=none persist=off
ports held peer
prompt A pages=4
submit A
tick 6
land peer A pages=2
tick
restart
expect tier device free=16
expect idle
tick 2
submit A
tick 6
land peer A
expect within 6 ticks A ready
expect A bytes ok
expect ranks agree
