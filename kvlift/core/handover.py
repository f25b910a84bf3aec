"""A leader ends before its pages have landed: the first follower takes its restores over.

A flight (a restore, or a read with its restore) belongs to one request and is shared by those that
follow it; the last share to go cancels it. Pages that the leader's peer was to bring can't be taken
over: the peer writes them for the leader alone. The follower asks its own peer, into its own pages.

    leader    |-- pinned --|== restore ==|== read, restore ==|~~ its peer ~~|      ends
    follower  |-- pinned --|............ follows ..............|~~ own peer ~~|
    then      |-- pinned --|== restore ==|== read, restore ==|~~ own peer ~~~~|
"""

from attrs import evolve

from kvlift.core.agreed import Open, Request
from kvlift.core.apply import happen
from kvlift.core.draft import Draft
from kvlift.core.event import HandedOver
from kvlift.core.ids import Attempt
from kvlift.core.phase import Filling
from kvlift.core.plan import Follow, Part, with_own


def hand_over(draft: Draft, attempt: Attempt) -> None:
    """Give the flights of a request that is about to end to its first follower, if it has one."""
    leader = draft.requests[attempt]
    if not isinstance(leader.phase, Filling):
        return
    followers = [
        request
        for request in draft.requests.values()
        if isinstance(request.phase, Filling)
        and request.phase.follow is not None
        and request.phase.follow.leader == attempt
        # Without its own peer it could not ask for what this flight does not bring.
        and request.phase.peer_gone is None
    ]
    if not followers:
        return
    heir = followers[0]
    parts = _parts_for(leader, heir)
    if not parts:
        return
    _exchange_pages(draft, leader, heir, parts)
    for other in followers[1:]:
        _follow_heir(draft, other, heir)


def _parts_for(leader: Request, heir: Request) -> tuple[Part, ...]:
    """Running parts from the heir's first missing page on, without a gap, that it follows."""
    assert isinstance(leader.phase, Filling)
    assert isinstance(heir.phase, Filling)
    assert heir.phase.follow is not None
    page = heir.phase.lease.n_shared
    if page < leader.phase.lease.n_shared:
        return ()  # the leader's pages were flushed: they are in the index, and nobody finds them
    taken: list[Part] = []
    for part in leader.phase.parts:
        if part.start != page or part.stop > heir.phase.follow.stop:
            break
        if part.n_good < part.stop - part.start:
            break
        taken.append(part)
        page = part.stop
    return tuple(taken)


def _exchange_pages(draft: Draft, leader: Request, heir: Request, parts: tuple[Part, ...]) -> None:
    """The heir's reserved pages for this range go to the leader, which will release them."""
    mine, theirs = leader.phase, heir.phase
    assert isinstance(mine, Filling)
    assert isinstance(theirs, Filling)
    start, stop = parts[0].start, parts[-1].stop
    leaders_pages = mine.lease.pages(start, stop)
    heirs_pages = theirs.lease.pages(start, stop)
    left = tuple(part for part in mine.parts if part not in parts)
    draft.put_phase(
        leader.attempt,
        evolve(mine, parts=left, lease=with_own(mine.lease, start, heirs_pages)),
    )
    for part in parts:
        for ticket in (part.read, part.copy):
            if ticket is not None:
                draft.tickets[ticket] = _of(draft.tickets[ticket], heir.attempt)
    bounds = mine.plan.bounds
    happen(
        draft,
        heir.attempt,
        HandedOver(
            lease=with_own(theirs.lease, start, leaders_pages),
            parts=parts,
            host=min(max(bounds.host, start), stop),
            storage=stop,
            follow=None,
        ),
    )


def _of(ticket: Open, owner: int) -> Open:
    return evolve(ticket, owner=owner)


def _follow_heir(draft: Draft, other: Request, heir: Request) -> None:
    """The other followers share with the heir from now on, as far as it goes."""
    phase = other.phase
    assert isinstance(phase, Filling)
    assert phase.follow is not None
    assert isinstance(heir.phase, Filling)
    assert heir.phase.follow is not None
    if phase.follow.stop <= heir.phase.follow.stop:
        follow = Follow(leader=heir.attempt, stop=phase.follow.stop)
        draft.put_phase(other.attempt, evolve(phase, follow=follow))
