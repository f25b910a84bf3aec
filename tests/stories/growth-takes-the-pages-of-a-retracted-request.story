# Growth may take the pages of a retracted request, as soon as they are safe on the host.

world ranks=2 page=4 device=8 host=16
config write=through persist=off

prompt A pages=4
prompt B pages=4

submit A
submit B
expect within 12 ticks A ready
expect within 12 ticks B ready
run A
run B
tick 6
retract B
expect within 8 ticks B retracted
grow A 2
expect within 3 ticks grow A granted
expect A bytes ok
finish A output=2
expect within 10 ticks A done
resume B
expect within 16 ticks B ready
expect B bytes ok
run B
tick
finish B
expect within 10 ticks B done
tick 8
expect ranks agree
expect idle
