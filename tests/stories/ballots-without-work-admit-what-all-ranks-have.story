# With idle_ballots=on every tick has its ballot, also when nothing is under way.

world ranks=2 page=4 device=16 host=8
config write=none persist=off idle_ballots=on

prompt A pages=4
tick 3
expect ballots 1
expect effects none
submit A
expect within 12 ticks A ready
expect A bytes ok
run A
expect within 4 ticks A running
finish A
expect within 10 ticks A done
expect ranks agree
