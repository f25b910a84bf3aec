# One rank has lost the first page of a prompt, so nothing of it is a hit, on no rank. At the end
# only that rank lacks a page: it writes it, and the next request finds all of it.

world ranks=2 page=4 device=16 host=8

prompt A pages=3
put A in storage
lose A[0] from storage rank=1

submit A
expect within 12 ticks A ready
expect A sources peer=3
expect A promise=0
expect count reads A 0
expect A bytes ok
run A
tick
finish A
expect within 12 ticks A done
tick 8
expect store has A[0:3] rank=0
expect store has A[0:3] rank=1

restart
submit A
expect within 14 ticks A ready
expect A sources storage=3
expect A wants nothing
expect A bytes ok
run A
tick
finish A
expect within 12 ticks A done
tick 6
expect ranks agree
expect idle
