# A request that has decoded two pages is retracted and resumed. Nothing decoded is lost:
# its prompt and its answer are on the device when it is back.

world ranks=2 page=4 device=16 host=16
config write=through persist=off

prompt A pages=3
prompt B pages=14

submit A output=2
expect within 10 ticks A ready
run A
tick
grow A 2
expect grow A granted
tick
retract A
expect within 8 ticks A retracted
submit B
expect within 16 ticks B ready
run B
tick
finish B
expect within 10 ticks B done

resume A
expect within 16 ticks A ready
expect A bytes ok
run A
tick
finish A output=2
expect within 10 ticks A done
tick 8
prompt C from=A[0:5] pages=6
expect C hit device=5 host=0 storage=0
expect idle
