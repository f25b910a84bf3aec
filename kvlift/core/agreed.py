"""The agreed half of the state: equal on all ranks after every tick, and digested.

It holds decisions and what is believed; physical pages, clocks and observations are rank-local.
Maps are replaced, never changed in place; their order is the agreed order of insertion.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from attrs import frozen

from kvlift.core.descent import Descent
from kvlift.core.ids import Attempt, DeviceHandle, HostHandle, Rid, Ticket
from kvlift.core.index import Index
from kvlift.core.phase import Phase, Resuming, Waiting
from kvlift.core.policy import Policy, Switch
from kvlift.core.prompt import Prompt


class Kind(Enum):
    """What a ticket is for; decides how its observations are read."""

    LOOKUP = "lookup"
    READ = "read"
    COPY = "copy"
    HOLD = "hold"
    TOKEN = "token"
    TAIL = "tail"
    MIRROR = "mirror"
    PERSIST = "persist"


@frozen
class Open:
    """An open ticket: whose it is, how many pages it is about, what the last verdict said of it."""

    kind: Kind
    owner: int
    n_pages: int
    progress: int = 0
    ceiling: int = 0


@frozen(kw_only=True)
class Request:
    """`prompt` grows at a retraction by what was decoded; `n_tokens_prompt` were submitted.

    `hold` is open only where there is a `peer`."""

    rid: Rid
    attempt: Attempt
    prompt: Prompt
    n_tokens_prompt: int
    peer: str
    priority: int
    n_pages_output: int
    hold: Ticket
    phase: Phase
    n_pages_given: int = 0


@frozen(kw_only=True)
class Drain:
    """Pages of an attempt that something may still touch; back when `tickets` are empty."""

    attempt: Attempt
    prompt: Prompt
    tickets: tuple[Ticket, ...]
    device: tuple[DeviceHandle, ...]
    host: tuple[HostHandle, ...]
    pin_host_start: int
    pin_host_stop: int


@frozen(kw_only=True)
class Ledger:
    """Pages of the device and the host by count. `room` is the least that any rank has to give.

    Conservation: free = room - live, and live is the number of handles that anybody holds."""

    device_room: int
    host_room: int
    device_live: int = 0
    host_live: int = 0
    next_device: int = 0
    next_host: int = 0


@frozen(kw_only=True)
class Growth:
    """A running request that waits for pages; refused at tick `deadline`."""

    attempt: Attempt
    n_pages: int
    deadline: int


@frozen(kw_only=True)
class Rates:
    """Measured microseconds a page: of the slowest rank's storage, of the fastest rank's peer."""

    prefetch_us: int = 0
    transfer_us: int = 0

    def is_read_dearer(self, threshold_percent: int) -> bool:
        """Whether a read takes longer than so much of what the transfer of the same pages would."""
        if not self.prefetch_us or not self.transfer_us:
            return False
        return self.prefetch_us * 100 > self.transfer_us * threshold_percent


@frozen(kw_only=True)
class Agreed:
    tick: int = 0
    digest: bytes = bytes(16)
    clock: int = 0
    next_ticket: int = 1
    next_attempt: int = 1
    storage: Switch = Switch.ON
    host_epoch: int = 0
    requests: Mapping[Attempt, Request] = MappingProxyType({})
    attempt_by_rid: Mapping[Rid, Attempt] = MappingProxyType({})
    tickets: Mapping[Ticket, Open] = MappingProxyType({})
    drains: tuple[Drain, ...] = ()
    descents: tuple[Descent, ...] = ()
    growths: tuple[Growth, ...] = ()
    index: Index = Index()
    ledger: Ledger
    rates: Rates = Rates()


def agreed_at_start(policy: Policy, storage: Switch) -> Agreed:
    """Nothing known, everything free."""
    ledger = Ledger(device_room=policy.n_device_pages, host_room=policy.n_host_pages)
    return Agreed(ledger=ledger, storage=storage)


def is_under_way(agreed: Agreed) -> bool:
    """Whether ranks have anything to agree about. If not, no ballot is sent."""
    if agreed.tickets or agreed.growths or agreed.descents or agreed.drains:
        return True
    return any(isinstance(r.phase, Waiting | Resuming) for r in agreed.requests.values())
