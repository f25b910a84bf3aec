# Nothing is written to storage that was taken away.

world ranks=2 page=4 device=16 host=16
config write=through persist=on

prompt A pages=4
submit A
expect within 10 ticks A ready
run A
tick
detach storage
finish A
expect within 10 ticks A done
tick 10
expect idle
expect store lacks A
attach storage
tick 2
submit A
expect within 10 ticks A ready
run A
tick
finish A
expect within 10 ticks A done
expect within 10 ticks store has A[0:4]
expect within 6 ticks idle
