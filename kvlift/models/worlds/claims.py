"""What every world claims: the invariants, the ghost's own checks, and how it all ends."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from kvlift.core.invariants import INVARIANTS, LOCAL_INVARIANTS, name_of
from kvlift.core.phase import Asking, Filling, Resuming, Waiting
from kvlift.core.submission import Abort
from kvlift.models.claim import (
    AlwaysOf,
    AlwaysStep,
    Claim,
    Live,
    Share,
    Sometimes,
    SometimesOf,
)
from kvlift.models.memo import memo
from kvlift.models.worlds.ghost import GHOST_CLAIMS
from kvlift.models.worlds.host import At
from kvlift.models.worlds.stage import Now

if TYPE_CHECKING:
    from kvlift.models.worlds.situation import Goal, Situation

CALM_SHARE: Final = "calm requests end well and use the cache"
"""The name of the `Share` that calm worlds (no fault, abort or deadline) claim: of all requests in
their last states those that ended well and took pages from the cache. A core that is safe because
it never uses the cache shows up here."""


def claims_of(world: "Situation") -> Iterator[Claim[Now]]:
    """The claims of a world, with its own goals."""
    agreed, locals_of, ranks = _agreed, world.stage.parts_in_local, _ranks
    for invariant in INVARIANTS:
        yield AlwaysOf(name_of(invariant), agreed, _breach_free(world, name_of(invariant)))
    for local in LOCAL_INVARIANTS:
        yield AlwaysOf(name_of(local), locals_of, _local_breach_free(world, name_of(local)))
    for claim in GHOST_CLAIMS:
        yield AlwaysOf(claim, ranks, _blameless(world, claim))
    yield AlwaysOf(
        "who waits for a verdict has a ballot out",
        lambda now: ((now.agreed, now.ballot >= 0),),
        lambda part: part[1] or _waits_for_nothing(world, part[0]),
    )
    if any(life.may_abort for life in world.lives):
        is_heard = memo(lambda calls, script: _is_heard(world, calls, script))
        yield AlwaysStep(
            "who is aborted has the answer with the next tick",
            lambda before, move, after: (
                not before.calls or move.label != "tick" or is_heard(before.calls, after.script)
            ),
        )
    for goal in world.goals:
        yield from _goals(world, goal)
    has_ended = memo(lambda script: _is_over(world, script))
    is_quiet = memo(lambda number: _is_quiet(world, number))
    yield Live("every submitted request ends", lambda now: not now.calls and has_ended(now.script))
    yield Live("every page comes back", lambda now: is_quiet(now.agreed))
    if world.climate.is_calm and world.n_faults == 0:
        yield AlwaysOf("every request ends well", _script, lambda part: _ends_well(world, part))
        yield Share(CALM_SHARE, lambda now: _n_over(world, now), lambda now: _n_warm(world, now))


# What the claims speak of.


def _agreed(now: Now) -> tuple[int]:
    return (now.agreed,)


def _ranks(now: Now) -> tuple[int, ...]:
    return now.ranks


def _group(now: Now) -> tuple[tuple[int, ...]]:
    return (now.ranks,)


def _script(now: Now) -> tuple[int]:
    return (now.script,)


# Whether they hold.


def _breach_free(world: "Situation", name: str) -> Callable[[int], bool]:
    return lambda agreed: name not in world.breaches(agreed)


def _local_breach_free(world: "Situation", name: str) -> Callable[[tuple[int, int]], bool]:
    return lambda part: name not in world.local_breaches(*part)


def _blameless(world: "Situation", claim: str) -> Callable[[int], bool]:
    return lambda rank: world.stage.ranks.parts[rank].wrong != claim


def _goals(world: "Situation", goal: "Goal") -> Iterator[Claim[Now]]:
    """A goal is seen in one kind of part."""
    agreed, ranks = world.stage.agreed, world.stage.ranks
    of_agreed, on, between = goal.is_reached, goal.is_reached_on, goal.is_reached_between
    if of_agreed is not None:
        yield SometimesOf(goal.name, _agreed, lambda part: of_agreed(agreed[part]))
    elif on is not None:
        yield SometimesOf(goal.name, _ranks, lambda part: on(ranks[part]))
    elif between is not None:
        yield SometimesOf(goal.name, _group, lambda part: between(tuple(ranks[r] for r in part)))
    else:
        yield Sometimes(goal.name, lambda _now: goal.arrow in world.stage.arrows)


def _waits_for_nothing(world: "Situation", agreed: int) -> bool:
    """Whether no ballot is needed in this state."""
    state = world.stage.agreed[agreed]
    waits = (Asking, Waiting, Filling, Resuming)
    is_waiting = any(isinstance(request.phase, waits) for request in state.requests.values())
    return not (is_waiting or state.tickets)


def _is_heard(world: "Situation", calls: tuple[int, ...], script: int) -> bool:
    """Whether all that were aborted by these calls have ended for the host."""
    said = [world.stage.calls[call] for call in calls]
    aborted = {call.rid for call in said if isinstance(call, Abort)}
    stands = zip(world.lives, world.stage.scripts.value(script), strict=True)
    return all(stand.at.has_ended for life, stand in stands if life.rid in aborted)


def _is_over(world: "Situation", script: int) -> bool:
    """Whether no request that was submitted is without its answer."""
    stands = world.stage.scripts.value(script)
    return all(stand.at is At.NEW or stand.at.has_ended for stand in stands)


def _is_quiet(world: "Situation", agreed: int) -> bool:
    """Nobody holds a page but the index, and nothing moves."""
    state = world.stage.agreed[agreed]
    return not (state.requests or state.drains or state.descents or state.tickets)


def _ends_well(world: "Situation", script: int) -> bool:
    stands = world.stage.scripts.value(script)
    return not any(stand.at in (At.FAILED, At.ABORTED) for stand in stands)


def _n_over(world: "Situation", now: Now) -> int:
    """Requests, in a state in which all have ended and nothing moves."""
    stands = world.stage.scripts.value(now.script)
    has_ended = all(stand.at.has_ended and not stand.n_lives for stand in stands)
    return len(stands) if has_ended and not now.calls and _is_quiet(world, now.agreed) else 0


def _n_warm(world: "Situation", now: Now) -> int:
    if not _n_over(world, now):
        return 0
    stands = world.stage.scripts.value(now.script)
    return sum(stand.at is At.DONE and stand.is_warm for stand in stands)
