# Host pages that are only cached make room for a prefetch.

world ranks=2 page=4 device=32 host=4
config write=none persist=off

prompt A pages=4
prompt B pages=6
put A in host
put B[0:4] in storage
submit B
expect within 12 ticks B ready
expect B sources device=0 host=0 storage=4 peer=2
expect B promise=4
expect A hit device=0 host=0 storage=0
