# Nothing is under way for a ready request, so its abort gives everything back at once.

world ranks=2 page=4 device=16 host=16
config write=none persist=off

prompt A pages=4
submit A
expect within 8 ticks A ready
abort A
tick
expect A aborted
expect A not draining
expect within 3 ticks idle
