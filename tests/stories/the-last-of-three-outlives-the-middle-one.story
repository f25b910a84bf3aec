# A chain: A brings pages 0 to 3, B follows it and brings 4 and 5, C follows B and brings its own 6
# and 7. B is aborted before anything came. C asks for what B was to bring, A is not disturbed, and
# in the end each page is kept once.

world ranks=2 page=4 device=24 host=8
config write=none persist=off
ports held peer

prompt A pages=4
prompt B from=A[0:4] pages=6
prompt C from=B[0:6] pages=8

submit A
tick 4
submit B
tick 4
submit C
tick 4
expect A wants 0:4
expect B wants 4:6
expect C wants 6:8
expect C promise=6

abort B
tick 6
expect B aborted
expect C filling
expect A wants 0:4
ack peer B
land peer A
tick 6
expect A ready
expect C not ready
land peer C
expect within 8 ticks C ready
expect C bytes ok
expect A bytes ok
run A
run C
tick
finish A
finish C
expect within 12 ticks C done
tick 6
expect A done
expect tier device free=16 cached=8 owned=0 draining=0
expect ranks agree
expect idle
