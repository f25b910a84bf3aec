"""What may happen to one rank between two ticks: landings of every kind, deadlines, failures.

Nothing here asks what the core would like: whatever is outstanding may land whole, in part, late,
twice, fail or never come. `cost` is taken from the world's budget of faults. What is fair: copies
and writes end, and so does a read that was cancelled; a connection that we close is proven closed;
clocks go on. Storage and the prefill node are fair until they fall silent, which costs a fault.
"""

from collections.abc import Iterator

from attrs import evolve, frozen

from kvlift.core.ids import NO_TICKET, Ticket
from kvlift.core.landed import (
    Landed,
    LookupAnswered,
    MirrorEnded,
    PagesArrived,
    PeerCause,
    PeerFailed,
    PeerLetGo,
    PersistEnded,
    PrefetchEnded,
    PrefetchProgressed,
    RestoreEnded,
    TokenArrived,
)
from kvlift.models.worlds.ghost import (
    Aside,
    DevicePage,
    Doing,
    HostPage,
    Operation,
    Rank,
    Talk,
    with_operation,
    with_talk,
)

TOKEN = 7
"""The first token of every request; its value decides nothing."""


@frozen(kw_only=True)
class Climate:
    """What this world's weather can do. `is_calm`: every request comes, and nothing fails.

    `has_pieces`: pages come one by one, too. `has_silence`: storage and prefill node may never
    answer, so that deadlines pass. `has_echoes`: reports may come twice. `has_prompt_peer`: the
    prefill node sends everything before the next tick, unless it is silent or fails.
    `has_early_token`: the first token may come before anything was asked for. `has_stuck_writes`:
    storage may take a write and never end it, until it is called back. `has_other_tokens`: one rank
    may be sent another first token than the others.
    """

    is_calm: bool = False
    has_pieces: bool = True
    has_failures: bool = True
    has_echoes: bool = False
    has_prompt_peer: bool = False
    has_silence: bool = False
    has_early_token: bool = False
    has_stuck_writes: bool = False
    has_other_tokens: bool = False
    peer_failures: frozenset[PeerCause] = frozenset()
    asides: tuple[Aside, ...] = ()


@frozen(kw_only=True)
class Event:
    """One thing that may happen. `label` has `{name}` where the request's name belongs."""

    label: str
    ticket: Ticket
    after: Rank
    fair: str | None = None
    cost: int = 0


# Landing pages.


def _with_tags(rank: Rank, one: Operation, n_good: int) -> Rank:
    """The pages as the operation leaves them: the first `n_good` right, the others garbage."""
    held = {page.page: page.tag for page in rank.host}
    on_device = {page.page: page.tag for page in rank.device}
    if one.doing is Doing.READ:
        good = dict(zip(one.host[:n_good], one.tags[:n_good], strict=True))
        host = tuple(HostPage(p.page, good.get(p.page, p.tag)) for p in rank.host)
        return evolve(rank, host=host)
    if one.doing is Doing.RESTORE:
        pairs = zip(one.device[:n_good], one.host[:n_good], strict=True)
        up = {target: held.get(source) for target, source in pairs}
        device = tuple(DevicePage(p.page, up.get(p.page, p.tag)) for p in rank.device)
        return evolve(rank, device=device)
    if one.doing is Doing.MIRROR:
        pairs_down = zip(one.host[:n_good], one.device[:n_good], strict=True)
        down = {target: on_device.get(source) for target, source in pairs_down}
        host = tuple(HostPage(p.page, down.get(p.page, p.tag)) for p in rank.host)
        return evolve(rank, host=host)
    if one.doing is Doing.PERSIST:
        return evolve(rank, stored=rank.stored | set(one.tags[:n_good]))
    return rank


def landed(rank: Rank, one: Operation, n_good: int) -> Rank:
    """The operation ends with its first `n_good` pages good; the core hears of it next tick."""
    return with_operation(_with_tags(rank, one, n_good), one, evolve(one, landed=n_good))


def n_stored(rank: Rank, one: Operation) -> int:
    """Pages of the operation that storage has, to its first hole."""
    n_pages = 0
    for tag in one.tags:
        if tag not in rank.stored:
            break
        n_pages += 1
    return n_pages


_VERB = {
    Doing.LOOKUP: "store {name}",
    Doing.READ: "store {name}",
    Doing.RESTORE: "copies {name}",
    Doing.MIRROR: "writes {name}",
    Doing.PERSIST: "writes {name}",
}


def events(rank: Rank, number: int, climate: Climate) -> Iterator[Event]:
    """Everything that may happen to this rank now."""
    for one in rank.operations:
        if one.landed is None:
            yield from _of_operation(rank, one, number, climate)
    for talk in rank.talks:
        yield from _of_talk(rank, talk, number, climate)
    yield from events_of_clock(rank, number, climate)


def _of_operation(rank: Rank, one: Operation, number: int, climate: Climate) -> Iterator[Event]:
    where = f"rank={number}"
    may_stick = one.doing is Doing.PERSIST and climate.has_stuck_writes
    may_stick |= one.doing in (Doing.LOOKUP, Doing.READ) and climate.has_silence
    if may_stick and not one.is_silent and not one.is_cancelled:
        silent = with_operation(rank, one, evolve(one, is_silent=True))
        yield Event(label=f"# storage may never answer {{name}} any more, {where}",
                    ticket=one.ticket, after=silent, cost=1)  # fmt: skip
    if one.doing is Doing.LOOKUP:
        if one.is_silent:
            late = landed(rank, one, n_stored(rank, one))
            yield Event(label=f"late store {{name}} {where}", ticket=one.ticket, after=late)
        return
    yield from _of_work(rank, one, number, climate)


def _of_work(rank: Rank, one: Operation, number: int, climate: Climate) -> Iterator[Event]:
    what, where = _VERB[one.doing], f"rank={number}"
    is_read = one.doing is Doing.READ
    n_most = n_stored(rank, one) if is_read else one.n_pages
    fair: str | None = f"{'storage' if is_read else 'copies and writes'} of rank {number}"
    if one.is_silent and not one.is_cancelled:
        fair = None

    def event(label: str, after: Rank, fair: str | None = None, cost: int = 0) -> Event:
        return Event(label=f"{label} {where}", ticket=one.ticket, after=after, fair=fair, cost=cost)

    after = landed(rank, one, n_most)
    yield event(f"land {what}{'' if n_most == one.n_pages else f' pages={n_most}'}", after, fair)
    if is_read and climate.has_pieces and one.n_done == 0 and n_most > 1:
        piece = with_operation(_with_tags(rank, one, 1), one, evolve(one, n_done=1))
        yield event("# page 1 of the read of {name} comes,", piece)
    if one.is_cancelled and one.n_done < n_most:
        yield event(f"land {what} pages={one.n_done}", landed(rank, one, one.n_done), fair)
    if climate.has_failures and n_most > one.n_done and not one.is_cancelled:
        for n_good in sorted({one.n_done, n_most - 1}):
            verb = f"fail {what}" if n_good == 0 else f"land {what} pages={n_good}"
            yield event(verb, landed(rank, one, n_good), None, 1)
    if climate.has_echoes:
        twice = evolve(after, echoes=(*rank.echoes, report_of(one, n_most)))
        yield event(f"land {what}\nagain {what}", twice, None, 1)
        if one.start > 0:  # that of the piece before it, while this one runs
            earlier = RestoreEnded(one.ticket, one.start, 0)
            yield event(f"again {what}", evolve(rank, echoes=(*rank.echoes, earlier)), None, 1)


def _of_talk(rank: Rank, talk: Talk, number: int, climate: Climate) -> Iterator[Event]:
    n_left = len(talk.places) - talk.n_landed
    if talk.has_let_go:
        return

    def event(label: str, after: Talk, fair: str | None = None, cost: int = 0) -> Event:
        at = "" if is_of_all_ranks(label) else f" rank={number}"
        return Event(label=f"{label}{at}", ticket=talk.ticket, cost=cost, fair=fair,
                     after=_arrived(rank, talk, after))  # fmt: skip

    fair = None if talk.is_silent else f"prefill node of rank {number}"
    is_late = talk.is_aborted or talk.failed is not None
    if climate.has_early_token and not (talk.is_asked or talk.has_token or is_late):
        early = evolve(talk, has_token=True)
        yield event("# the first token of {name} comes before it is asked for,", early)
    if climate.has_other_tokens and not (talk.has_other_token or talk.has_token):
        other = evolve(talk, has_other_token=True)
        yield event("# the first token of {name} will be another one,", other, None, 1)
    if climate.has_echoes and talk.n_told and not talk.is_echoing:
        yield event("again peer {name}", evolve(talk, is_echoing=True), None, 1)
    is_at_once = climate.has_prompt_peer and not talk.is_silent
    if talk.is_asked and not is_late and not is_at_once and (n_left or not talk.has_token):
        all_here = evolve(talk, n_landed=talk.n_landed + n_left, has_token=True)
        yield event("land peer {name}", all_here, fair)
    if n_left and (is_late or (climate.has_pieces and talk.n_landed == 0)):
        cost = int(n_left == 1 and not is_late)
        piece = evolve(talk, n_landed=talk.n_landed + 1)
        yield event("land peer {name} pages=1", piece, None, cost)
    if not talk.is_silent and climate.has_silence:
        silent = evolve(talk, is_silent=True)
        yield event(
            "# the prefill node may never send anything for {name} any more,", silent, None, 1
        )
    if talk.is_aborted:
        yield event("ack peer {name}", evolve(talk, has_let_go=True), fair)
    if talk.is_closing:
        closed = evolve(talk, has_let_go=True, failed=talk.failed or PeerCause.LOST)
        yield event("# the connection for {name} is closed,", closed, f"transport of rank {number}")
    if talk.failed is None and PeerCause.GONE in climate.peer_failures and not talk.is_aborted:
        yield event("expire peer {name}", evolve(talk, failed=PeerCause.GONE), None, 1)
    if talk.failed is None and PeerCause.LOST in climate.peer_failures:
        lost = evolve(talk, failed=PeerCause.LOST, has_let_go=True)
        yield event("fail peer {name}", lost, None, 1)


def is_of_all_ranks(label: str) -> bool:
    """Stories say these of the prefill node, not of one rank's wire to it."""
    return label.startswith(("expire", "ack"))


def _arrived(rank: Rank, before: Talk, after: Talk) -> Rank:
    come = slice(before.n_landed, after.n_landed)
    written = dict(zip(after.places[come], after.tags[come], strict=True))
    device = tuple(DevicePage(p.page, written.get(p.page, p.tag)) for p in rank.device)
    return with_talk(evolve(rank, device=device), before, after)


def events_of_clock(rank: Rank, number: int, climate: Climate) -> Iterator[Event]:
    """Where nothing comes any more a deadline passes in the end: the ranks' clocks differ, and so
    do the beginnings, so any one may be first. What waits for its turn may also run late."""
    silent = [one.ticket for one in rank.operations if one.is_silent and one.landed is None]
    silent += [talk.ticket for talk in rank.talks if talk.is_silent and not talk.has_let_go]
    silent += [token for hold, token in rank.local.token_by_hold.items() if hold in silent]
    for ticket, watch in rank.local.watches.items():
        if watch.timeout_ms is None or watch.has_ended or ticket in rank.expired:
            continue
        if ticket in silent or (not watch.has_begun and climate.has_silence):
            after = evolve(rank, expired=tuple(sorted((*rank.expired, ticket))))
            yield Event(
                label=f"advance {watch.timeout_ms + 1}ms rank={number}",
                ticket=ticket,
                after=after,
                fair=f"clock of rank {number}" if ticket in silent else None,
                cost=int(ticket not in silent),
            )


def events_of_neighbour(rank: Rank, number: int, climate: Climate) -> Iterator[Event]:
    """Pages that somebody else takes, whether or not they are in use here, and gives back."""
    where = f"rank={number}"
    if rank.aside != (0, 0):
        label = "\n".join(
            f"unwedge {tier} {where}"
            for tier, n_pages in zip(("device", "host"), rank.aside, strict=True)
            if n_pages
        )
        back = evolve(rank, aside=(0, 0))
        yield Event(label=label, ticket=NO_TICKET, after=back, fair=f"neighbour of rank {number}")
        return
    for aside in climate.asides:
        label = "\n".join(
            f"wedge {tier} {n_pages} {where}"
            for tier, n_pages in zip(("device", "host"), aside, strict=True)
            if n_pages
        )
        yield Event(label=label, ticket=NO_TICKET, after=evolve(rank, aside=aside), cost=1)


# What the core hears at the next tick.


def report_of(one: Operation, n_good: int) -> Landed:
    match one.doing:
        case Doing.LOOKUP:
            return LookupAnswered(one.ticket, n_good)
        case Doing.READ:
            return PrefetchEnded(one.ticket, n_good)
        case Doing.RESTORE:
            return RestoreEnded(one.ticket, n_good, one.start)
        case Doing.MIRROR:
            return MirrorEnded(one.ticket, n_good)
        case Doing.PERSIST:
            return PersistEnded(one.ticket, n_good)


def delivered(rank: Rank, climate: Climate) -> tuple[Rank, list[Landed]]:
    """The reports of what has happened since the last tick, and the rank without them."""
    if climate.has_prompt_peer:
        for talk in rank.talks:
            rank = _arrived(rank, talk, _at_once(talk))
    reports: list[Landed] = []
    running: list[Operation] = []
    for one in rank.operations:
        if one.doing is Doing.LOOKUP and one.landed is None and not one.is_silent:
            reports.append(report_of(one, n_stored(rank, one)))
        elif one.landed is not None:
            reports.append(report_of(one, one.landed))
        elif one.doing is not Doing.LOOKUP or one.ticket in rank.local.watches:
            running.append(one)
            if one.n_done:
                reports.append(PrefetchProgressed(one.ticket, one.n_done))
    talks: list[Talk] = []
    for talk in rank.talks:
        reports += _said(talk)
        if not talk.has_let_go:
            talks.append(
                evolve(
                    talk,
                    n_told=talk.n_landed,
                    is_token_told=talk.has_token,
                    is_failure_told=talk.failed is not None,
                    is_echoing=False,
                )
            )
    after = evolve(rank, operations=tuple(running), talks=tuple(talks), echoes=(), expired=())
    return after, reports + list(rank.echoes)


def _at_once(talk: Talk) -> Talk:
    if not talk.is_asked or talk.is_silent or talk.is_aborted or talk.failed is not None:
        return talk
    return evolve(talk, n_landed=len(talk.places), has_token=True)


def _said(talk: Talk) -> Iterator[Landed]:
    if talk.n_landed > talk.n_told or talk.is_echoing:
        yield PagesArrived(talk.ticket, talk.n_landed)
    if talk.has_token and not talk.is_token_told:
        yield TokenArrived(talk.ticket, TOKEN + talk.has_other_token, 0.0)
    if talk.failed is not None and not talk.is_failure_told:
        yield PeerFailed(talk.ticket, talk.failed, "the prefill node fails")
    if talk.has_let_go:
        yield PeerLetGo(talk.ticket)
