# B uses A's first page alone: A's second page is no younger for it, and leaves before D's, which
# was used after it.
world page=2 device=3 host=0
config write=none persist=off
prompt A pages=2
prompt B from=A[0:1] pages=2
prompt D pages=1
submit A
expect within 9 ticks A ready
run A
tick
finish A
tick
submit D
expect within 9 ticks D ready
run D
tick
finish D
tick
expect A hit device=2
submit B
expect within 9 ticks B ready
expect A hit device=1
expect D hit device=1
