# A running request is retracted while nothing can be copied to the host. Retraction
# succeeds all the same; what had to leave the device is computed again at the end.

world ranks=2 page=4 device=8 host=4
config write=through persist=off

prompt A pages=4
prompt B pages=8

wedge host 4
submit A
expect within 10 ticks A ready
run A
tick 2
retract A
expect within 8 ticks A retracted
submit B                           # needs the whole device
expect within 16 ticks B ready
expect B bytes ok
run B
tick
finish B
expect within 10 ticks B done

resume A
expect within 16 ticks A ready
expect A sources recompute=4
expect A bytes ok
run A
tick
finish A
expect within 10 ticks A done
unwedge host
tick 8
expect ranks agree
expect idle
