# Fewer stored pages than prefetch_min_pages are not read.

world ranks=1 page=4 device=16 host=8
config write=none persist=off prefetch_min_pages=3

prompt A pages=6
prompt B pages=6
put A[0:2] in storage
put B[0:3] in storage
submit A
submit B
expect within 12 ticks A ready
expect within 12 ticks B ready
expect A sources storage=0 peer=6
expect B sources storage=3 peer=3
expect count reads A 0
expect count reads B 1
