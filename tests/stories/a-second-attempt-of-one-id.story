# After its end an id may be used again; while it lives a second submission is refused.

world ranks=2 page=4 device=16 host=8
config write=none persist=off
ports held peer

prompt A pages=4
submit A
tick 4
submit A
tick 2
expect A filling
abort A
tick 3
expect A aborted
submit A
tick 4
expect A filling
ack peer A
tick 2
land peer A
expect within 6 ticks A ready
expect A bytes ok
run A
tick
finish A
expect within 8 ticks A done
tick 4
expect idle
