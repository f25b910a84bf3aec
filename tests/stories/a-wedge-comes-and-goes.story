# Device pages that somebody else has are no room until they are back.

world ranks=2 page=4 device=8 host=8
config write=none persist=off
prompt A pages=6
wedge device 4 rank=1
submit A
tick 8
expect A queued
expect tier device owned=4 rank=1
expect tier device owned=0 rank=0
unwedge device rank=1
expect within 8 ticks A ready
expect ranks agree
