# Growth that nobody can give is refused within three ticks and harms nobody.

world ranks=2 page=4 device=8 host=8
config write=through persist=off
ports held writes
prompt A pages=4
prompt B pages=3
submit A
submit B
expect within 10 ticks A ready
expect within 10 ticks B ready
run A
run B
tick 2
grow A 3
expect within 3 ticks grow A refused
grow A 1
expect grow A granted
expect A bytes ok
expect B bytes ok
