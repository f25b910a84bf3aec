# Two requests are under way when the decode worker restarts. They have ended here, the
# peer has heard of it, and what storage holds serves the next attempt.

world ranks=2 page=4 device=16 host=16 storage=12
config write=through persist=on

prompt A pages=4
prompt B pages=4

submit A
expect within 12 ticks A ready
run A
tick
finish A
expect within 10 ticks A done
tick 10
expect store has A[0:4]
expect tier storage free=8 cached=4
submit B
tick 2
restart
expect B failed
expect A hit device=0 host=0 storage=4
submit A
expect within 16 ticks A ready
expect A sources device=0 host=0 storage=4 peer=0
expect A bytes ok
expect ranks agree
