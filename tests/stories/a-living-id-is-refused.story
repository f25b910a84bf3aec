# The same id is submitted twice. The second submission is refused with a clear error and
# without effect; a prompt that can never fit is refused as well.

world ranks=2 page=4 device=8 host=8
config write=none persist=off

prompt A pages=4
prompt B pages=9

submit A
tick
submit A
expect A error contains "A"
expect within 10 ticks A ready
expect A bytes ok
run A
tick
submit B
expect B failed
finish A
expect within 10 ticks A done
tick 4
expect idle
