# A look-up that never answers is a miss after the deadline for storage, with wait_complete
# as well.

world ranks=2 page=4 device=16 host=8
config write=none persist=off prefetch=wait_complete prefetch_deadline_ms=200

prompt A pages=6
put A[0:4] in storage
silence store
submit A
tick 6
expect A queued
expect A not failed
advance 250ms
expect within 8 ticks A ready
expect A sources device=0 host=0 storage=0 peer=6
expect A promise=0
expect count lookups A 1
expect count reads A 0
