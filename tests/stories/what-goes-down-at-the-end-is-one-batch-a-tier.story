# The end of a request writes one batch to storage; landing the writes lands all of it.

world ranks=2 page=4 device=16 host=16
config write=through persist=on
ports held writes

prompt A pages=4
submit A output=2
expect within 12 ticks A ready
run A
tick 2
grow A 2
finish A output=2
tick 4
land writes A
tick 4
land writes A
tick 4
expect store has A[0:4]
expect within 8 ticks A done
