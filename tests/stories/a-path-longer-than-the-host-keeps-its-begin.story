# A's two pages fill the host. B begins with them and is twice as long: its other pages find no
# room, and those that are there stay, because without them the others are worth nothing.

world ranks=2 page=4 device=16 host=2
config write=through persist=off

prompt A pages=2
prompt B from=A[0:2] pages=4

submit A
expect within 8 ticks A ready
run A
tick
finish A
tick 6
expect tier host cached=2 free=0
submit B
expect within 8 ticks B ready
tick 4
abort B
tick 2
flush device
tick
expect B hit device=0 host=2
