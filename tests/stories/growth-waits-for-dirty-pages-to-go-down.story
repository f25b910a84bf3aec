# B needs a page more, and all others are A's, which nothing below has yet. One of them goes down
# first, and is found there.

world ranks=2 page=4 device=8 host=8
config write=back persist=off

prompt A pages=4
prompt B pages=4

submit A
expect within 8 ticks A ready
run A
tick
finish A
expect within 6 ticks A done
submit B
expect within 8 ticks B ready
run B
tick
grow B 1
tick 8
expect grow B granted
expect A hit device=3 host=1
