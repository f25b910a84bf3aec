# The prefill node dies after it has given all that A had asked of it. Then A's restore fails: there
# is nobody left to ask, and A says so.

world ranks=2 page=4 device=16 host=8
config write=none persist=off
ports held copies

prompt A pages=4
put A[0:2] in host

submit A
tick 6
expect A filling
kill peer
tick 4
expect A not failed
fail copies A
expect within 6 ticks A failed
tick 4
expect tier device free=16
