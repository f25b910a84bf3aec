# The host is flushed while A's pages are copied down to it: they are on the device, and the host
# does not keep them.

world ranks=2 page=4 device=16 host=8
config write=through persist=off
ports held writes

prompt A pages=3

submit A
expect within 8 ticks A ready
tick 2
expect tier host free=5
flush host
tick
land writes A
tick 4
expect tier host cached=0 free=8
expect A hit device=3 host=0
