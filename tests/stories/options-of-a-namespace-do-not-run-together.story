# tenant=ab salt=c is not tenant=a salt=bc.

world ranks=1 page=4 device=16 host=16
config write=none persist=off

prompt A pages=3
prompt B like=A tenant=ab salt=c
prompt C like=A tenant=a salt=bc
prompt D like=A salt=c tenant=ab
put B in host
expect A hit host=0
expect C hit host=0
expect D hit host=3
