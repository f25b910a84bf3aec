# Pages of the host that lie side by side are restored by one copy, whoever put them there.

world ranks=2 page=4 device=16 host=16
config write=none persist=off
ports held copies

prompt A pages=6
put A[0:2] in host
put A[2:4] in host

submit A
tick
tick
expect within 2 ticks effects StartRestore=1
tick 4
expect effects none
land copies A
expect within 4 ticks A ready
expect A bytes ok
