# A has asked for growth that has to wait until dirty pages are on the host, and is aborted
# meanwhile. The growth is nobody's: what it waited for becomes room for everybody.

world ranks=2 page=4 device=6 host=6
config write=back persist=off
ports held writes

prompt D pages=3
prompt A pages=3
prompt B pages=6

submit D
expect within 12 ticks D ready
run D
tick
finish D
expect within 12 ticks D done
submit A
expect within 12 ticks A ready
run A
tick
grow A 2
tick
abort A
tick 2
expect A aborted
ports auto
tick 6
expect tier device owned=0 draining=0 reserved=0
expect idle

submit B
expect within 20 ticks B ready
expect B bytes ok
run B
tick
abort B
tick 6
expect ranks agree
expect idle
