"""Dangerous corners that the worlds must reach, or what they claim of them would be empty."""

from typing import Final

from kvlift.core.agreed import Agreed
from kvlift.core.event import (
    CopyShort,
    HandedOver,
    LeaderLost,
    PeerStopped,
    ReadOverdue,
    ReadShort,
    SharedCame,
    TailEnded,
)
from kvlift.core.phase import Draining, Filling, Resuming, Retracted, Running, Waiting
from kvlift.core.tier import Source
from kvlift.models.worlds.ghost import Doing, Rank
from kvlift.models.worlds.situation import Goal


def _fillings(agreed: Agreed) -> list[Filling]:
    return [r.phase for r in agreed.requests.values() if isinstance(r.phase, Filling)]


def _given_up(agreed: Agreed) -> bool:
    parts = [part for phase in _fillings(agreed) for part in phase.parts]
    return any(part.copy is not None and part.n_good < part.stop - part.start for part in parts)


def _reads_on(rank: Rank) -> bool:
    return any(
        one.doing is Doing.READ and one.is_cancelled and one.landed is None
        for one in rank.operations
    )


def _is_quarantined(rank: Rank) -> bool:
    return any(talk.is_aborted and talk.n_landed < len(talk.places) for talk in rank.talks)


def _writes_after_the_end(rank: Rank) -> bool:
    late = [talk for talk in rank.talks if talk.is_aborted or talk.failed is not None]
    return any(talk.n_landed > talk.n_told for talk in late)


def _differ(ranks: tuple[Rank, ...]) -> bool:
    running = [{one.ticket for one in rank.operations} for rank in ranks]
    return any(one != running[0] for one in running)


READY: Final = Goal(name="a request runs", is_reached=lambda a: any(
    isinstance(r.phase, Running) for r in a.requests.values()))  # fmt: skip
DRAINS: Final = Goal(name="pages are held back after the answer", is_reached=lambda a: any(
    isinstance(r.phase, Draining) for r in a.requests.values()))  # fmt: skip
WIDENS: Final = Goal(name="the peer is asked for more", is_reached=lambda a: any(
    len(phase.wanted) > 1 for phase in _fillings(a)))  # fmt: skip
SHORT: Final = Goal(name="pages under a copy are given up", is_reached=_given_up)
READ_ON: Final = Goal(name="a read goes on that nobody waits for", is_reached_on=_reads_on)
QUARANTINE: Final = Goal(name="a peer may write after an abort", is_reached_on=_is_quarantined)
LATE: Final = Goal(name="a peer writes after the end", is_reached_on=_writes_after_the_end)
CLOSED: Final = Goal(name="we close a silent peer", is_reached_on=lambda rank: any(
    talk.is_closing for talk in rank.talks))  # fmt: skip
APART: Final = Goal(name="the ranks are at different points", is_reached_between=_differ)
OVERDUE_APART: Final = Goal(
    name="a deadline passes on one rank first",
    is_reached_between=lambda ranks: len({bool(rank.expired) for rank in ranks}) > 1,
)
WAITS: Final = Goal(name="a request waits for room", is_reached=lambda a: any(
    isinstance(r.phase, Waiting) and a.ledger.device_live == a.ledger.device_room
    for r in a.requests.values()))  # fmt: skip
BYPASSED: Final = Goal(name="the head of the line is overtaken", is_reached=lambda a: any(
    isinstance(r.phase, Waiting) and r.phase.n_bypassed > 0
    for r in a.requests.values()))  # fmt: skip
FOLLOWS: Final = Goal(name="a request shares another one's work", is_reached=lambda a: any(
    phase.follow is not None for phase in _fillings(a)))  # fmt: skip
MIRROR_DURING_FLUSH: Final = Goal(name="a page is flushed while it is copied", is_reached=lambda a:
    any((s.host_stale or s.device_stale) and (s.mirroring or s.persisting)
        for s in a.index.segments.values()))  # fmt: skip
COMES_BACK: Final = Goal(name="a retracted request comes back", is_reached=lambda a: any(
    phase.plan.rest is Source.RECOMPUTE for phase in _fillings(a)))  # fmt: skip
LOST_PAGES: Final = Goal(name="pages must be computed again", is_reached=lambda a: any(
    phase.plan.rest is Source.RECOMPUTE and phase.plan.bounds.storage < phase.plan.n_pages
    for phase in _fillings(a)))  # fmt: skip
PARTIAL_PAGE: Final = Goal(name="a partial page is safe on the host", is_reached=lambda a: any(
    isinstance(r.phase, Retracted | Resuming) and r.phase.tail_host is not None
    and r.phase.tail_copy is None for r in a.requests.values()))  # fmt: skip

HANDED_OVER: Final = Goal(
    name="a follower takes a flight over", arrow=(Filling, HandedOver, Filling)
)
LEADER_LOST: Final = Goal(name="a follower loses its leader", arrow=(Filling, LeaderLost, Filling))
SHARED: Final = Goal(name="a follower gets what was shared", arrow=(Filling, SharedCame, Filling))
READ_SHORT: Final = Goal(name="a read comes up short", arrow=(Filling, ReadShort, Filling))
READ_OVERDUE: Final = Goal(name="a read is overdue", arrow=(Filling, ReadOverdue, Filling))
COPY_SHORT: Final = Goal(name="a copy comes up short", arrow=(Filling, CopyShort, Filling))
PEER_FAILS: Final = Goal(name="a request fails by its peer", arrow=(Filling, PeerStopped, Draining))
PEER_LEFT_EARLY: Final = Goal(
    name="a peer goes that is not needed any more", arrow=(Filling, PeerStopped, Filling)
)
TAIL_LANDS_LATE: Final = Goal(
    name="a partial page lands while its request waits", arrow=(Resuming, TailEnded, Resuming)
)
