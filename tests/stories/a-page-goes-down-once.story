# A's pages are on their way to the host when A ends. They are not copied a second time.

world ranks=2 page=4 device=16 host=8
config write=through persist=off
ports held writes

prompt A pages=3

submit A
expect within 8 ticks A ready
run A
tick
expect tier host free=5
finish A
tick
expect effects StartMirror=0
expect tier host free=5
ports auto
tick 6
expect tier host cached=3 free=5
expect idle
