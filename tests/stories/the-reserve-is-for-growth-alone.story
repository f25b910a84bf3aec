# Two pages are kept for the growth of each running request. Nobody is admitted into them,
# so that the growth is granted at once although another request waits for room.

world ranks=2 page=4 device=8 host=8
config write=none persist=off decode_reserve_pages=2

prompt A pages=4
prompt B pages=3

submit A
expect within 10 ticks A ready
run A
tick 2
submit B                           # four pages are free, two of them are A's reserve
tick 6
expect B queued
grow A 2
expect grow A granted
tick 2
expect B queued

finish A output=2
expect within 10 ticks A done
expect within 10 ticks B ready
expect B bytes ok
run B
tick
finish B
expect within 10 ticks B done
tick 4
expect ranks agree
expect idle
