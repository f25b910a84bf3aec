# What only one rank holds is no hit and no divergence.

world ranks=2 page=4 device=16 host=8
config write=none persist=off

prompt A pages=4
put A[0:4] in storage rank=1
put A[0:2] in device rank=0
expect A hit device=0 host=0 storage=0
submit A
expect within 12 ticks A ready
expect A sources device=0 host=0 storage=0 peer=4
expect A promise=0
expect ranks agree
