# Between an abort and its acknowledgement pages may still land; the next request is not
# disturbed, and a second acknowledgement confirms nothing.

world ranks=2 page=4 device=8 host=8
config write=none persist=off
ports held peer

prompt A pages=4
prompt B pages=4
submit A
tick 6
abort A
expect within 4 ticks A aborted
expect tier device free=4 draining=4
submit B
tick 6
expect B filling
land peer A pages=2
tick 2
land peer B
expect within 6 ticks B ready
expect B bytes ok
ack peer A
tick 2
expect tier device draining=0 free=4
ack peer A
tick 2
expect B bytes ok
run B
tick
finish B
expect within 8 ticks B done
tick 4
expect idle
