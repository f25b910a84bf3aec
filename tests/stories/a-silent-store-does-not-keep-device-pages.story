# With write=none pages are persisted from the device. A store that falls silent in the middle
# must let go of them, or the next request would wait for its room for ever.

world ranks=2 page=4 device=6 host=0
config write=none persist=on prefetch_stall_ms=1000

prompt A pages=4
prompt B pages=6

submit A
expect within 10 ticks A ready
run A
tick 2
silence store
finish A
tick 2
submit B
tick 4
expect B queued                      # the store may still read A's pages
advance 2s                           # the look-up of B is a miss, the write is called back
tick 2
expect within 10 ticks B ready
expect B bytes ok
run B
tick
