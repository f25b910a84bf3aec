# Everything is flushed while a request reads, restores and receives.

world ranks=2 page=4 device=16 host=16
config write=through persist=on
ports held

prompt A pages=8
put A[0:1] in device
put A[1:3] in host
put A[3:5] in storage
submit A
tick 6
expect A filling
flush all
tick 4
expect A not failed
land all
tick 3
land all
tick 3
ports auto
expect within 10 ticks A ready
expect A bytes ok
expect ranks agree
run A
tick
finish A
expect within 12 ticks A done
tick 8
expect idle
