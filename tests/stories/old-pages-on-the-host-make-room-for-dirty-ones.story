# With write-back the host is full of pages that nothing needs. A's pages are nowhere below when B
# needs their room: the old ones leave the host, and A's go down.

world ranks=2 page=4 device=4 host=4
config write=back persist=off

prompt X pages=4
prompt A pages=4
prompt B pages=4
put X[0:4] in host

submit A
expect within 8 ticks A ready
run A
tick
finish A
expect within 6 ticks A done
submit B
expect within 12 ticks B ready
expect A hit device=0 host=4
expect X hit device=0 host=0
