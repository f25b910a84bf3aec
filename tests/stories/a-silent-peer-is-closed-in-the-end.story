# An aborted transfer's pages stay aside while the peer is silent, but not for ever: after
# the quarantine kvlift closes the connection itself, and the pages come back.

world ranks=2 page=4 device=9 host=4
config write=none persist=off quarantine_max_ms=2000

prompt A pages=4

silence peer
submit A
tick 8
abort A
expect within 6 ticks A aborted
tick 4
expect tier device free=5 draining=4
advance 1s
tick 4
expect tier device free=5 draining=4
advance 1500ms
expect within 10 ticks idle
expect tier device free=9 draining=0
expect ranks agree
