# Nothing is wanted of the peer but the first token, which comes by itself.

world ranks=2 page=4 device=16 host=16
config write=none persist=off
ports held

prompt A pages=4
put A in device
submit A
expect within 8 ticks A ready
expect A wants nothing
expect A promise=4
expect A sources peer=0 device=4
abort A
expect within 2 ticks A aborted
expect A not draining
expect peer told committed A
expect tier device draining=0
