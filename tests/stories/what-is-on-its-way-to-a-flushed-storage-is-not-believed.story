# A write to storage has landed here and there when everything is flushed, and the ranks have not
# agreed yet that it has. Storage has nothing after the flush, and nothing is believed to be there:
# the next request with this prompt writes it again.

world ranks=2 page=4 device=16 host=16
config write=through persist=on
ports held writes

prompt A pages=4

submit A
expect within 10 ticks A ready
run A
tick 2
land writes A
tick 4
finish A
tick 4                             # the write to storage is under way
land writes A
flush all
tick 6
expect store lacks A[0]
expect A hit device=0 host=0 storage=0
expect idle

submit A
expect within 14 ticks A ready
expect A sources device=0 host=0 storage=0 peer=4
run A
tick 2
land writes A
tick 4
finish A
tick 4
land writes A
tick 6
expect store has A[0:4]
expect idle
