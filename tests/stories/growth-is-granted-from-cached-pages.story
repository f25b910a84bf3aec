# A running request grows. Free pages are taken first, then pages that are only cached, and
# when nothing is left the growth is refused and the request goes on with what it has.

world ranks=2 page=4 device=8 host=8
config write=none persist=off

prompt A pages=3
prompt B pages=3
put B[0:3] in device

submit A
expect within 10 ticks A ready
run A
tick
expect tier device free=2 cached=3 owned=3
grow A 2                           # the two free ones
expect grow A granted
expect tier device free=0 cached=3 owned=5
grow A 2                           # two of B's three
expect within 3 ticks grow A granted
tick
expect tier device owned=7
expect B hit device=1 host=0 storage=0
grow A 2                           # one is left
expect within 3 ticks grow A refused
expect A running
expect A bytes ok

finish A output=4
expect within 10 ticks A done
tick 4
expect idle
