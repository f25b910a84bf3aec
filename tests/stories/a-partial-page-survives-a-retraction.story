# A request with two odd tokens is retracted. Its last page is not full and belongs to
# nobody else; it goes down privately and comes back with the rest.

world ranks=2 page=4 device=8 host=16
config write=through persist=off

prompt A pages=3 tokens=14
prompt B pages=7

submit A
expect within 10 ticks A ready
expect A sources device=0 host=0 storage=0 peer=4
expect A wants 0:4
run A
tick 4
retract A
expect within 8 ticks A retracted

submit B                           # takes nearly the whole device
expect within 16 ticks B ready
expect B bytes ok
run B
tick
finish B
expect within 10 ticks B done

resume A
expect within 16 ticks A ready
expect A sources recompute=0
expect A bytes ok
run A
tick
finish A
expect within 10 ticks A done
tick 8
expect ranks agree
expect idle
