# A is retracted and its pages have gone down. Then storage is taken away and every tier is
# forgotten. Nothing is left of it: the host computes all again, the request does not fail, and
# once storage is back it is written like any other.

world ranks=2 page=4 device=8 host=8

prompt A pages=4

submit A
expect within 12 ticks A ready
run A
tick
retract A
tick 8
expect A retracted
detach storage
tick
flush all
tick 4
expect tier device cached=0 owned=0

resume A
expect within 12 ticks A ready
expect A sources device=0 host=0 storage=0 recompute=4
expect A not failed
attach storage
run A
tick
finish A
expect within 12 ticks A done
tick 8
expect store has A[0:4]
expect ranks agree
expect idle
