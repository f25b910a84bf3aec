# Dirty pages that do not fit on the host must not keep a request out for ever.

world ranks=1 page=4 device=8 host=4
config write=back persist=off

prompt A pages=5
prompt B pages=2
prompt C pages=7

submit A
expect within 10 ticks A ready
run A
tick
finish A
submit B
expect within 10 ticks B ready
run B
tick
finish B
expect within 10 ticks B done
tick 4
submit C
expect within 30 ticks C ready
expect C bytes ok
