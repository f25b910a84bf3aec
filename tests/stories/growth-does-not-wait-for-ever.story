# B needs a page more. A's pages would give it room once they are below, but the copy down hangs:
# after a few ticks the growth is refused.

world ranks=2 page=4 device=8 host=8
config write=back persist=off
ports held writes

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
expect grow B refused
