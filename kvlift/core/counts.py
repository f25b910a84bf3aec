"""How many pages each tier has in which state, counted from the agreed state alone.

    free + cached + owned + reserved + draining = room

On the device `cached` are pages that only the index holds and `owned` those that requests use,
shared ones once. On the host `cached` are the index's, `reserved` those of a running read or copy
down, `owned` private last pages. `draining` may still be touched by work that nobody waits for.
"""

from typing import assert_never

from attrs import frozen

from kvlift.core.agreed import Agreed
from kvlift.core.descent import Mirroring
from kvlift.core.phase import (
    Asking,
    Draining,
    Ended,
    Filling,
    Ready,
    Resuming,
    Retracted,
    Running,
    Waiting,
)


@frozen(kw_only=True)
class Counts:
    free: int
    cached: int
    owned: int
    reserved: int
    draining: int


def device_counts(agreed: Agreed) -> Counts:
    owned = agreed.index.n_device - agreed.index.n_device_idle
    for request in agreed.requests.values():
        match request.phase:
            case Filling(lease=lease) | Ready(lease=lease) | Running(lease=lease):
                owned += len(lease.own)
            case Retracted(tail_device=tail) | Resuming(tail_device=tail):
                owned += tail is not None
            case Asking() | Waiting() | Draining() | Ended():
                continue
            case _:
                assert_never(request.phase)
    return Counts(
        free=agreed.ledger.device_room - agreed.ledger.device_live,
        cached=agreed.index.n_device_idle,
        owned=owned,
        reserved=0,
        draining=sum(len(drain.device) for drain in agreed.drains),
    )


def host_counts(agreed: Agreed) -> Counts:
    owned = reserved = 0
    for request in agreed.requests.values():
        match request.phase:
            case Filling(parts=parts):
                reserved += sum(len(part.host) for part in parts)
            case Retracted(tail_host=tail) | Resuming(tail_host=tail):
                owned += tail is not None
            case Asking() | Waiting() | Ready() | Running() | Draining() | Ended():
                continue
            case _:
                assert_never(request.phase)
    for descent in agreed.descents:
        if isinstance(descent.phase, Mirroring):
            reserved += len(descent.phase.host)
    return Counts(
        free=agreed.ledger.host_room - agreed.ledger.host_live,
        cached=agreed.index.n_host,
        owned=owned,
        reserved=reserved,
        draining=sum(len(drain.host) for drain in agreed.drains),
    )


def is_conserved(counts: Counts, room: int) -> bool:
    total = counts.free + counts.cached + counts.owned + counts.reserved + counts.draining
    return total == room
