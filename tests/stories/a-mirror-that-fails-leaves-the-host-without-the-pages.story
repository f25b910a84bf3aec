# A copy down fails on one rank: no rank believes in the host pages.

world ranks=2 page=4 device=16 host=16
config write=through persist=off
ports held writes

prompt A pages=4
submit A
expect within 10 ticks A ready
run A
tick 4
fail writes A rank=1
land writes A rank=0
tick 4
expect tier host cached=0 reserved=0
finish A
tick 6
flush device
ports auto
tick 6
expect ranks agree
