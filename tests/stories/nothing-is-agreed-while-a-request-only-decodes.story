# While requests only decode there is nothing to agree about and no effect.

world ranks=4 page=4 device=16 host=16
config write=through persist=on

prompt A pages=4
submit A
expect within 10 ticks A ready
run A
tick 8
expect ballots 0
expect effects none
tick 3
expect ballots 0
