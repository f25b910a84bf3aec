# The prefill node refuses a request. The request fails on all ranks, with the node's
# reason in its error, and leaves nothing behind; the next attempt is served.

world ranks=2 page=4 device=16 host=8
config write=none persist=off
ports held peer

prompt A pages=4

submit A
tick 6
expect A filling
reject peer A reason="no such model"
expect within 8 ticks A failed
expect A error contains "no such model"
expect A error contains "prefill"
tick 6
expect idle

ports auto
submit A                           # the same id again: a new attempt
expect within 10 ticks A ready
expect A bytes ok
