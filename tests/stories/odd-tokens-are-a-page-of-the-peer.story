# A prompt of eight pages and a bit: the bit is a page of the device, of the peer and of
# what is wanted, and is never cached.

world ranks=2 page=4 device=16 host=16
config write=through persist=on

prompt A pages=8 tokens=33
put A[0:4] in device

submit A
expect within 10 ticks A ready
expect A sources device=4 host=0 storage=0 peer=5
expect A wants 4:9
expect A promise=4
expect A bytes ok
expect tier device free=7 owned=9
run A
tick
finish A
expect within 10 ticks A done
tick 10
expect tier device free=8 cached=8
expect tier host cached=8
expect store has A[0:8]
expect idle
