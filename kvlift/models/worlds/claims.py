"""What every world claims: the invariants, the ghost's own checks, and how it all ends."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from kvlift.core.invariants import INVARIANTS, LOCAL_INVARIANTS, name_of
from kvlift.core.phase import Asking, Filling, Resuming, Waiting
from kvlift.models.claim import Always, Claim, Live, Share, Sometimes
from kvlift.models.worlds.ghost import GHOST_CLAIMS
from kvlift.models.worlds.host import At
from kvlift.models.worlds.stage import Now

if TYPE_CHECKING:
    from kvlift.models.worlds.situation import Goal, Situation

CALM_SHARE: Final = "calm requests end well and use the cache"
"""The name of the `Share` that calm worlds (no fault, abort or deadline) claim: of all requests in
their last states those that ended well and took pages from the cache. A core that is safe because
it never uses the cache shows up here."""

Holds = Callable[[Now], bool]


def claims_of(world: "Situation") -> Iterator[Claim[Now]]:
    """The claims of a world, with its own goals."""
    for invariant in INVARIANTS:
        yield Always(name_of(invariant), _agreed(world, name_of(invariant)))
    for local in LOCAL_INVARIANTS:
        yield Always(name_of(local), _local(world, name_of(local)))
    for claim in GHOST_CLAIMS:
        yield Always(claim, _ghost(world, claim))
    yield Always("who waits for a verdict has a ballot out", lambda now: _is_voting(world, now))
    for goal in world.goals:
        yield Sometimes(goal.name, _goal(world, goal))
    yield Live("every submitted request ends", _has_ended)
    yield Live("every page comes back", lambda now: _is_quiet(world, now))
    if world.climate.is_calm and world.n_faults == 0:
        yield Always("every request ends well", _ends_well)
        yield Share(CALM_SHARE, lambda now: _n_over(world, now), lambda now: _n_warm(world, now))


def _agreed(world: "Situation", name: str) -> Holds:
    return lambda now: name not in world.breaches(now.agreed)


def _local(world: "Situation", name: str) -> Holds:
    return lambda now: not any(name in world.local_breaches(now.agreed, r) for r in now.ranks)


def _ghost(world: "Situation", claim: str) -> Holds:
    ranks = world.stage.ranks
    return lambda now: not any(ranks[rank].wrong == claim for rank in now.ranks)


def _goal(world: "Situation", goal: "Goal") -> Holds:
    agreed, ranks = world.stage.agreed, world.stage.ranks

    on, between, arrow = goal.is_reached_on, goal.is_reached_between, goal.arrow

    def is_reached(now: Now) -> bool:
        if goal.is_reached is not None and goal.is_reached(agreed[now.agreed]):
            return True
        if on is not None and any(on(ranks[rank]) for rank in now.ranks):
            return True
        if between is not None and between(tuple(ranks[rank] for rank in now.ranks)):
            return True
        return arrow is not None and arrow in world.stage.arrows

    return is_reached


def _is_voting(world: "Situation", now: Now) -> bool:
    state = world.stage.agreed[now.agreed]
    waits = (Asking, Waiting, Filling, Resuming)
    is_waiting = any(isinstance(request.phase, waits) for request in state.requests.values())
    return now.ballot >= 0 or not (is_waiting or state.tickets)


def _has_ended(now: Now) -> bool:
    """Whether no request that was submitted is without its answer."""
    return not now.calls and all(s.at is At.NEW or s.at.has_ended for s in now.script)


def _is_quiet(world: "Situation", now: Now) -> bool:
    """Nobody holds a page but the index, and nothing moves."""
    state = world.stage.agreed[now.agreed]
    return not (state.requests or state.drains or state.descents or state.tickets)


def _ends_well(now: Now) -> bool:
    return not any(stand.at in (At.FAILED, At.ABORTED) for stand in now.script)


def _n_over(world: "Situation", now: Now) -> int:
    """Requests, in a state in which all have ended and nothing moves."""
    is_last = _is_quiet(world, now) and all(s.at.has_ended and not s.n_lives for s in now.script)
    return len(now.script) if is_last and not now.calls else 0


def _n_warm(world: "Situation", now: Now) -> int:
    if not _n_over(world, now):
        return 0
    return sum(stand.at is At.DONE and stand.is_warm for stand in now.script)
