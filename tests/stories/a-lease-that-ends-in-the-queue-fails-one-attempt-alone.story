# A waits for room when the prefill node's lease for it ends. Once there is room the node has
# nothing to give any more: this attempt fails, with the node's name, holds nothing, and the next
# attempt of the same id is a request like any other.

world ranks=2 page=4 device=8 host=8
config write=none persist=off

prompt A pages=4
wedge device 6

submit A
tick 6
expect A queued
expire peer A
tick 2
expect A queued|failed
unwedge device
expect within 14 ticks A failed
expect A error contains "prefill"
tick 4
expect tier device free=8 cached=0 owned=0 draining=0
expect ranks agree
expect idle

submit A
expect within 12 ticks A ready
expect A sources peer=4
expect A bytes ok
run A
tick
finish A
expect within 10 ticks A done
tick 4
expect idle
