# With write=none the pages go from the device straight to storage.

world ranks=2 page=4 device=16 host=0
config write=none persist=on

prompt A pages=4
prompt B from=A[0:4] pages=5
put A[0:2] in storage

submit A
expect within 12 ticks A ready
run A
tick
finish A
expect within 10 ticks A done
expect within 8 ticks store has A[0:4]
expect within 4 ticks idle
