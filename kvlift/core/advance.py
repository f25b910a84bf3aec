"""One tick of the whole core: `advance(state, verdict, submissions) -> (state, outcome)`.

Pure, without a clock. Order within a tick: what all ranks have agreed; what the host scheduler
asks; what follows from both; the way down; who may start.
The digest chains everything that was decided, so that two ranks that once decided differently
never have the same digest again.
"""

import struct
from collections.abc import Iterable
from hashlib import blake2b

from attrs import evolve, frozen

from kvlift.core.admission import admit
from kvlift.core.agreed import Agreed
from kvlift.core.ballot import Verdict
from kvlift.core.calls import take_call
from kvlift.core.dirty import keep_low_water
from kvlift.core.draft import Draft
from kvlift.core.effect import Effect
from kvlift.core.growth import grow, settle_growths
from kvlift.core.hear import order
from kvlift.core.ids import DeviceHandle, Rid, Ticket
from kvlift.core.local import Limits, Local
from kvlift.core.notice import Notice
from kvlift.core.phase import Running
from kvlift.core.policy import Policy, Switch
from kvlift.core.settle import settle
from kvlift.core.submission import Submission
from kvlift.core.tier import Tier
from kvlift.core.verdicts import take_verdict
from kvlift.core.way_down import settle_descents


@frozen(kw_only=True)
class State:
    """`agreed` is equal on all ranks after every tick; `local` is this rank's."""

    agreed: Agreed
    local: Local


@frozen(kw_only=True)
class Decision:
    """What a tick decided: effects for the ranks, notices for the host, tickets that are over.

    `arrows` are the transitions taken, for the statechart and for coverage; `movers`, one an arrow,
    are the attempts (of a way down: the descents) that took them."""

    effects: tuple[Effect, ...]
    notices: tuple[Notice, ...]
    closed: tuple[Ticket, ...]
    arrows: tuple[tuple[type, type, type], ...]
    movers: tuple[int, ...]


@frozen(kw_only=True)
class Outcome:
    """A tick of one rank: `starts` are the effects that run now, in order."""

    starts: tuple[Effect, ...]
    decision: Decision


def advance(
    state: State,
    verdict: Verdict | None,
    submissions: Iterable[Submission],
    *,
    policy: Policy,
    limits: Limits,
    now_ns: int,
) -> tuple[State, Outcome]:
    """One tick of one rank: the agreed half decides, the local half lets effects start.

    `now_ns` reaches the local half alone, as the begin of deadlines."""
    agreed, decision = advance_agreed(state.agreed, verdict, submissions, policy)
    local, starts = order(state.local, limits, decision.effects, decision.closed, now_ns)
    return State(agreed=agreed, local=local), Outcome(starts=starts, decision=decision)


def advance_agreed(
    agreed: Agreed,
    verdict: Verdict | None,
    submissions: Iterable[Submission],
    policy: Policy,
) -> tuple[Agreed, Decision]:
    """The agreed half of a tick: equal arguments give equal results, on every rank."""
    draft = Draft(agreed, policy)
    if verdict is not None:
        take_verdict(draft, verdict)
    calls = tuple(submissions)
    for call in calls:
        take_call(draft, call)
    settle(draft)
    settle_descents(draft)
    settle_growths(draft)
    keep_low_water(draft)
    if verdict is not None:
        admit(draft)
        settle(draft)
        settle_descents(draft)
    return _close(draft, verdict, calls)


def grow_agreed(
    agreed: Agreed, rid: Rid, n_pages: int, policy: Policy
) -> tuple[Agreed, Decision, tuple[DeviceHandle, ...] | None]:
    """A running request's growth, between ticks; on all ranks in the same order.

    The pages, or None: then it waits if the new state has a growth of it, or else is refused.
    Raises `LookupError` for a request that is not running."""
    draft = Draft(agreed, policy)
    request = draft.request(rid)
    if request is None or not isinstance(request.phase, Running):
        raise LookupError(f"request {rid!r} is not running")
    pages = grow(draft, request, n_pages)
    settle_descents(draft)
    after, decision = closed_draft(draft)
    return evolve(after, tick=agreed.tick), decision, pages


def closed_draft(draft: Draft) -> tuple[Agreed, Decision]:
    """The state that a draft between two ticks has become."""
    return _close(draft, None, ())


def _close(
    draft: Draft, verdict: Verdict | None, calls: tuple[Submission, ...]
) -> tuple[Agreed, Decision]:
    if draft.policy.device_tier is Switch.OFF and draft.index.n_device_idle:
        draft.index.evict(Tier.DEVICE, draft.index.n_device_idle, draft.policy.eviction)
    draft.collect_evicted()
    decision = Decision(
        effects=tuple(draft.effects),
        notices=tuple(draft.notices),
        closed=tuple(draft.closed),
        arrows=tuple(draft.arrows),
        movers=tuple(draft.movers),
    )
    before = draft.before
    agreed = Agreed(
        tick=before.tick + 1,
        digest=_digest(before.digest, verdict, calls, decision),
        clock=draft.clock,
        next_ticket=draft.next_ticket,
        next_attempt=draft.next_attempt,
        storage=draft.storage,
        host_epoch=draft.host_epoch,
        requests=draft.requests,
        attempt_by_rid=draft.attempt_by_rid,
        tickets=draft.tickets,
        drains=tuple(draft.drains),
        descents=tuple(draft.descents),
        growths=tuple(draft.growths),
        index=draft.index.frozen(),
        ledger=draft.ledger,
        rates=draft.rates,
    )
    return agreed, decision


def _digest(
    before: bytes, verdict: Verdict | None, calls: tuple[Submission, ...], decision: Decision
) -> bytes:
    """A chain over decisions: cost grows with what a tick did, not with what is cached."""
    is_news = verdict is not None and bool(verdict.observations)
    if not (is_news or calls or decision.effects or decision.notices or decision.arrows):
        return before
    hasher = blake2b(before, digest_size=16)
    if verdict is not None:
        hasher.update(_bytes_of(verdict))
    for call in calls:
        hasher.update(repr(call).encode())
        for secret in ("output", "prompt"):
            value = getattr(call, secret, None)
            if value is not None:
                # Not the namespace: it names the shard of this rank, so it differs between ranks.
                hasher.update(value if isinstance(value, bytes) else value.tokens)
    # Who moved: a growth between two ticks names its request nowhere else.
    decided = (decision.effects, decision.notices, decision.closed, decision.movers)
    hasher.update(repr(decided).encode())
    return hasher.digest()


def _bytes_of(verdict: Verdict) -> bytes:
    """The verdict's numbers, as 64-bit integers."""
    numbers = [verdict.device_room, verdict.host_room, verdict.n_submissions]
    for ticket, seen in verdict.observations:
        numbers += (ticket, seen.progress, seen.ended, seen.ceiling)
    return struct.pack(f"<{len(numbers)}q", *numbers)
