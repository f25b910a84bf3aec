# A is retracted with a partial last page, and the full pages in front of it are flushed from host
# and device: the partial page is of no use, and its host page is free again.

world ranks=2 page=4 device=8 host=8
config write=none persist=off

prompt A pages=2 tokens=11

submit A
expect within 8 ticks A ready
run A
tick
retract A
tick 6
expect tier host free=5
flush all
resume A
expect within 8 ticks A ready
expect A sources host=0 recompute=3
expect tier host free=8
