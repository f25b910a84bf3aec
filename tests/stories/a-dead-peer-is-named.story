# A request that still needs pages of a dead peer fails, and the reason names the peer.

world ranks=2 page=4 device=16 host=8
config write=none persist=off
ports held peer

prompt A pages=4
submit A
tick 6
land peer A pages=2 rank=0
kill peer
expect within 4 ticks A failed
expect A error contains "prefill"
expect within 4 ticks idle
