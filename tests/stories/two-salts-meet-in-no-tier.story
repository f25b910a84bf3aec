# Equal tokens under two salts are different pages, on storage as well.

world ranks=2 page=4 device=16 host=8
config write=through persist=on

prompt A pages=3 salt=one
prompt B like=A salt=two

submit A
expect within 12 ticks A ready
run A
tick
finish A
tick 10
expect A hit device=3
expect B hit device=0 host=0 storage=0
flush device
flush host
tick
expect A hit storage=3
expect B hit device=0 host=0 storage=0
