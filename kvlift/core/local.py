"""The local half of the state: what this rank sees of the tickets that are open.

`order` takes the effects of a plan and lets those through that may start now; `hear` takes the
reports of the ports and the clock. The clock ends here: a deadline becomes a `ceiling` (see
`observation`). Work inside pages that are leased goes on without a verdict: what has been read is
restored at once. In-flight limits park what exceeds them, first come first served.
Nothing here decides what other ranks must know; everything here is an observation of theirs.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from attrs import evolve, frozen

from kvlift.core.agreed import Kind, Rates
from kvlift.core.effect import StartMirror, StartPersist, StartPrefetch, StartRestore
from kvlift.core.ids import DeviceHandle, HostHandle, Ticket
from kvlift.core.observation import OVERDUE, Observation
from kvlift.core.policy import PrefetchPolicy

NS_PER_MS: Final = 1_000_000
NEVER_NS: Final = 2**63 - 1

Parkable: TypeAlias = StartPrefetch | StartRestore | StartMirror | StartPersist
"""Effects of which only so many may be in flight; the others wait for their turn."""


@frozen(kw_only=True)
class Limits:
    """Deadlines in milliseconds without progress, and how much may be in flight on this rank.

    `cost_threshold_percent`: the policy's, by which reads are left out."""

    prefetch: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE
    prefetch_deadline_ms: int = 1000
    prefetch_stall_ms: int = 30_000
    transfer_deadline_ms: int = 60_000
    quarantine_max_ms: int = 300_000
    prefetches_in_flight_max: int = 16
    restores_in_flight_max: int = 16
    mirrors_in_flight_max: int = 16
    persists_in_flight_max: int = 16
    cost_threshold_percent: int = 100

    def read_deadline_ms(self) -> int:
        if self.prefetch is PrefetchPolicy.DEADLINE:
            return self.prefetch_deadline_ms
        return self.prefetch_stall_ms

    def n_in_flight_max(self, kind: Kind) -> int | None:
        """None: no limit of this kind."""
        return {
            Kind.READ: self.prefetches_in_flight_max,
            Kind.COPY: self.restores_in_flight_max,
            Kind.MIRROR: self.mirrors_in_flight_max,
            Kind.PERSIST: self.persists_in_flight_max,
        }.get(kind)


@frozen(kw_only=True)
class Watch:
    """One open ticket. `timeout_ms` runs from `since_ns`, the last progress; None: not running.

    `n_pages`: pages that are to come; for a peer's conversation, all that were wanted so far.
    `has_begun`: the port has it; otherwise it is parked or waits for the read in front of it.
    `is_cancelled`: of a read, the port has been told, which it is once.
    """

    kind: Kind
    n_pages: int
    ceiling: int
    progress: int = 0
    has_ended: bool = False
    has_begun: bool = True
    is_cancelled: bool = False
    since_ns: int = 0
    timeout_ms: int | None = None
    begun_ns: int = 0

    def seen(self) -> Observation:
        return Observation(self.progress, int(self.has_ended), self.ceiling)


@frozen(kw_only=True)
class Chain:
    """The restore that follows a read on this rank, one piece after the other.

    `read`: where its pages come from; None: no more of them come. `n_read`: so many may be
    restored. The piece [start, stop) is under way or parked; where that is empty, all before it is
    on the device.
    """

    read: Ticket | None
    host: tuple[HostHandle, ...]
    device: tuple[DeviceHandle, ...]
    n_read: int = 0
    start: int = 0
    stop: int = 0


@frozen(kw_only=True)
class Local:
    """`chains`: restores behind reads, by their own tickets; `restore_by_read` leads to them.
    `token_by_hold`: under which ticket a first token is awaited. `tokens`, `reasons`: what peers
    said, by conversation; never part of a decision, and dropped a tick after the end (`leaving`).
    `parked`: effects that wait for their turn. `deadline_ns`: nothing is overdue before. `n_stale`:
    reports that came too late, so far."""

    watches: Mapping[Ticket, Watch] = MappingProxyType({})
    chains: Mapping[Ticket, Chain] = MappingProxyType({})
    restore_by_read: Mapping[Ticket, Ticket] = MappingProxyType({})
    parked: tuple[Parkable, ...] = ()
    n_in_flight: Mapping[Kind, int] = MappingProxyType({})
    token_by_hold: Mapping[Ticket, Ticket] = MappingProxyType({})
    tokens: Mapping[Ticket, tuple[int, float]] = MappingProxyType({})
    reasons: Mapping[Ticket, str] = MappingProxyType({})
    dismissed: tuple[Ticket, ...] = ()
    rates: Rates = Rates()
    deadline_ns: int = NEVER_NS
    n_stale: int = 0
    leaving: tuple[Ticket, ...] = ()


_NOTHING_SEEN: Final = Observation(0, 0, 0)


def seen(local: Local, tickets: Iterable[Ticket]) -> tuple[Observation, ...]:
    """This rank's observation of each ticket, for the ballot."""
    watches = local.watches
    return tuple(
        watches[ticket].seen() if ticket in watches else _NOTHING_SEEN for ticket in tickets
    )


def is_overdue(watch: Watch, now_ns: int) -> bool:
    return (
        watch.timeout_ms is not None
        and not watch.has_ended
        and now_ns - watch.since_ns > watch.timeout_ms * NS_PER_MS
    )


def next_deadline_ns(local: Local) -> int | None:
    """When a host with an empty batch must wake up at the latest. None: never."""
    return None if local.deadline_ns == NEVER_NS else local.deadline_ns


def first_deadline_ns(watches: Iterable[Watch]) -> int:
    """The earliest instant after which one of these is overdue."""
    return min(
        (
            watch.since_ns + watch.timeout_ms * NS_PER_MS
            for watch in watches
            if watch.timeout_ms is not None and not watch.has_ended
        ),
        default=NEVER_NS,
    )


def ended_with(watch: Watch, n_pages: int) -> Watch:
    """The ticket has ended with its first `n_pages` good; what was given up stays given up."""
    ceiling = min(watch.ceiling, n_pages)
    return evolve(watch, has_ended=True, progress=n_pages, ceiling=ceiling, timeout_ms=None)


def given_up(watch: Watch) -> Watch:
    """The deadline has passed: a ballot bit."""
    ceiling = 0 if watch.kind is Kind.LOOKUP else OVERDUE
    return evolve(watch, ceiling=ceiling, timeout_ms=None)
