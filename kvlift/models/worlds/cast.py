"""What a tick does to one rank: the real local half of the core beside the ghost, each part worked
out once for what it depends on.
"""

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from attrs import define, evolve, field, frozen

from kvlift.core.advance import Decision, State, advance
from kvlift.core.agreed import Agreed
from kvlift.core.ballot import Verdict
from kvlift.core.canonical import Name, Naming, renamed_all, renamed_local
from kvlift.core.effect import Effect
from kvlift.core.hear import hear, order
from kvlift.core.ids import DeviceHandle, Ticket
from kvlift.core.local import NS_PER_MS, Limits, first_deadline_ns
from kvlift.core.notice import BecameReady
from kvlift.core.policy import Policy
from kvlift.core.submission import Submission
from kvlift.models.memo import Numbered, memo
from kvlift.models.worlds.ghost import (
    DIFFERENT,
    LYING_INDEX,
    TOO_MANY,
    WRONG_CONTENT,
    Bench,
    DevicePage,
    Doing,
    HostPage,
    Rank,
    Tag,
)
from kvlift.models.worlds.shelf import NOTHING, Pages, Parts, Ranks, Shelf
from kvlift.models.worlds.truth import is_right, is_true
from kvlift.models.worlds.weather import Climate, delivered

NOW_NS: Final = 10**15
"""All clocks stand here; a deadline passes by moving the begin of one watch into the past."""


@frozen(kw_only=True)
class Turn:
    """A tick of the agreed half: where it led (a number), from where, and under which names.

    `orders`: the number of its effects and closed tickets. `names`, `page_names`: numbers of what
    the naming says to ranks, and to their pages. `claims`: of what it says of the pages."""

    before: Agreed
    verdict: Verdict | None
    calls: tuple[Submission, ...]
    after: Agreed
    decision: Decision
    naming: Naming
    number_after: int
    orders: int = 0
    names: int = 0
    page_names: int = 0
    claims: int = 0
    is_growth: bool = False


class _Started(NamedTuple):
    operations: int
    talks: int
    pages: int
    stored: int
    wrong: str


@define(eq=False)
class Cast:
    """All that can become of a rank. Numbers are those of `ranks` and `turns`."""

    policy: Policy
    limits: Limits
    climate: Climate
    n_ranks: int
    turns: Shelf[Turn]
    ranks: Ranks = field(factory=Ranks, init=False)
    starts: Numbered[tuple[Effect, ...]] = field(factory=Numbered, init=False)
    _is_same: dict[int, bool] = field(factory=dict, init=False)
    _orders: Shelf[Decision] = field(factory=Shelf, init=False)
    _names: Shelf[Naming] = field(factory=Shelf, init=False)
    _claims: Shelf[Turn] = field(factory=Shelf, init=False)
    hear: Callable[[int], int] = field(init=False)
    follow: Callable[[int, int], int] = field(init=False)
    written: Callable[[int, tuple[tuple[DeviceHandle, Tag], ...]], int] = field(init=False)
    _deliver: Callable[[int, int, int, int, int, int], tuple[int, int, int, int]] = field(
        init=False
    )
    _listen: Callable[[int, tuple[Ticket, ...], int], tuple[int, int]] = field(init=False)
    _order: Callable[[int, int], tuple[int, int]] = field(init=False)
    _start: Callable[[int, int, int, int, int], _Started] = field(init=False)
    _truth: Callable[[int, int], str] = field(init=False)
    _is_too_many: Callable[[int], bool] = field(init=False)
    _asks_silently: Callable[[int], bool] = field(init=False)
    _new_local: Callable[[int, int], int] = field(init=False)
    _new_operations: Callable[[int, int], int] = field(init=False)
    _new_talks: Callable[[int, int], int] = field(init=False)
    _new_pages: Callable[[int, int], int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.starts.number(())
        self.hear = memo(self._hear_of)
        self.follow = memo(self._follow_of)
        self.written = memo(self._written_of)
        self._deliver = memo(self._deliver_of)
        self._listen = memo(self._listen_of)
        self._order = memo(self._order_of)
        self._start = memo(self._start_of)
        self._truth = memo(self._truth_of)
        self._is_too_many = memo(self._is_too_many_of)
        self._asks_silently = memo(self._asks_silently_of)
        self._new_local = memo(self._new_local_of)
        self._new_operations = memo(self._new_operations_of)
        self._new_talks = memo(self._new_talks_of)
        self._new_pages = memo(self._new_pages_of)

    # Hearing.

    def _hear_of(self, number: int) -> int:
        parts = self.ranks.parts[number]
        operations, talks, pages, reports = self._deliver(
            parts.operations,
            parts.talks,
            parts.pages if self.climate.has_prompt_peer and parts.talks else -1,
            parts.stored,
            parts.echoes,
            parts.local if self._asks_silently(parts.operations) else -1,
        )
        pages = parts.pages if pages < 0 else pages
        local, starts = self._listen(parts.local, parts.expired, reports)
        after = _Started(operations, talks, pages, parts.stored, "")
        if starts:
            after = self._start(*after[:4], starts)
        wrong = parts.wrong or after.wrong
        return self.ranks.number(Parts(local, *after[:4], (), 0, wrong, parts.aside))

    def _deliver_of(
        self, operations: int, talks: int, pages: int, stored: int, echoes: int, local: int
    ) -> tuple[int, int, int, int]:
        ranks = self.ranks
        device, host = ranks.pages.value(max(0, pages))
        before = Rank(
            local=NOTHING if local < 0 else ranks.locals[local],
            operations=ranks.operations.value(operations),
            talks=ranks.talks.value(talks),
            device=device,
            host=host,
            stored=ranks.stored.value(stored),
            echoes=ranks.reports.value(echoes),
        )
        rank, reports = delivered(before, self.climate)
        return (
            ranks.operations.number(rank.operations),
            ranks.talks.number(rank.talks),
            -1 if pages < 0 else ranks.pages.number((rank.device, rank.host)),
            ranks.reports.number(tuple(reports)),
        )

    def _asks_silently_of(self, operations: int) -> bool:
        """Whether what is delivered depends on what the core still waits for."""
        ahead = self.ranks.operations.value(operations)
        return any(one.doing is Doing.LOOKUP and one.is_silent for one in ahead)

    def _listen_of(self, number: int, late: tuple[Ticket, ...], reports: int) -> tuple[int, int]:
        if not late and not reports:
            return number, 0
        local, news = self.ranks.locals[number], self.ranks.reports.value(reports)
        if late:
            watches = {
                ticket: evolve(watch, since_ns=NOW_NS - ((watch.timeout_ms or 0) + 1) * NS_PER_MS)
                if ticket in late
                else watch
                for ticket, watch in local.watches.items()
            }
            local = evolve(local, watches=watches, deadline_ns=first_deadline_ns(watches.values()))
        after, starts = hear(local, self.limits, news, NOW_NS)
        return self.ranks.number_of_local(after), self.starts.number(starts)

    def _start_of(
        self, operations: int, talks: int, pages: int, stored: int, starts: int
    ) -> _Started:
        ranks = self.ranks
        bench = self._bench(
            ranks.ghost(operations=operations, talks=talks, pages=pages, stored=stored)
        )
        bench.start(self.starts.value(starts))
        rank = bench.done()
        return _Started(
            ranks.operations.number(rank.operations),
            ranks.talks.number(rank.talks),
            ranks.pages.number((rank.device, rank.host)),
            ranks.stored.number(rank.stored),
            rank.wrong,
        )

    def _bench(self, rank: Rank) -> Bench:
        return Bench(rank, self.policy.n_device_pages, self.policy.n_host_pages)

    # Following what all have decided.

    def numbered(self, turn: Turn) -> Turn:
        """The turn with the numbers of what a rank looks at in it, so that equal orders, names and
        claims of different turns are worked out once."""
        decision, names = turn.decision, turn.naming.names
        pages = tuple(tuple(names[name].items()) for name in (Name.DEVICE, Name.HOST))
        others = tuple(
            tuple(names[name].items()) for name in (Name.TICKET, Name.ATTEMPT, Name.EPOCH)
        )
        ready = [one for one in decision.notices if isinstance(one, BecameReady)]
        prompts = [turn.after.requests[one.attempt].prompt for one in ready]
        index = tuple(
            (one.id, one.parent, one.namespace, one.tokens, one.n_pages, one.device, one.host)
            for one in turn.after.index.segments.values()
        )
        return evolve(
            turn,
            orders=self._orders.number((decision.effects, decision.closed), lambda: decision),
            names=self._names.number((turn.naming.is_identity, pages, others), lambda: turn.naming),
            page_names=self._names.number(pages, lambda: turn.naming),
            claims=self._claims.number((index, *ready, *prompts), lambda: turn),
        )

    def _follow_of(self, number: int, turn_number: int) -> int:
        """One rank carries out what all have decided; its own half of `advance` runs here."""
        parts, turn = self.ranks.parts[number], self.turns[turn_number]
        local, starts = self._order(parts.local, turn.orders)
        if turn_number not in self._is_same:
            is_alone = turn.is_growth or self.n_ranks == 1
            self._is_same[turn_number] = is_alone or self._is_decided_by(turn, parts.local)
        after = _Started(*parts[1:5], "")
        if starts:
            after = self._start(*after[:4], starts)
        talks = self._remembered(after.talks, local) if after.talks else 0
        wrong = (
            parts.wrong
            or after.wrong
            or (TOO_MANY if self._is_too_many(after.pages) else "")
            or ("" if self._is_same[turn_number] else DIFFERENT)
            or self._truth(turn.claims, after.pages)
        )
        mine = (*parts[5:7], wrong, parts.aside)
        kept = Parts(local, after.operations, talks, after.pages, after.stored, *mine)
        return self.ranks.number(self._renamed(kept, turn))

    def _order_of(self, number: int, orders: int) -> tuple[int, int]:
        decision = self._orders[orders]
        if not decision.effects and not decision.closed:
            return number, 0
        local = self.ranks.locals[number]
        after, starts = order(local, self.limits, decision.effects, decision.closed, NOW_NS)
        return self.ranks.number_of_local(after), self.starts.number(starts)

    def _is_decided_by(self, turn: Turn, number: int) -> bool:
        """Whether a rank that runs all of `advance` decides and starts the same. The agreed half
        does not see the local one, so the first rank that follows a turn speaks for all."""
        local = self.ranks.locals[number]
        state, outcome = advance(
            State(agreed=turn.before, local=local),
            turn.verdict,
            turn.calls,
            policy=self.policy,
            limits=self.limits,
            now_ns=NOW_NS,
        )
        after, starts = self._order(number, turn.orders)
        return (
            state.agreed == turn.after
            and outcome.decision == turn.decision
            and self.ranks.number_of_local(state.local) == after
            and self.starts.number(outcome.starts) == starts
        )

    def _remembered(self, number: int, local: int) -> int:
        """The talks that somebody waits for, or under which something may still be written."""
        talks, watched = self.ranks.talks.value(number), self.ranks.locals[local].watches
        kept = tuple(
            talk for talk in talks if talk.ticket in watched or talk.n_landed < len(talk.places)
        )
        return number if len(kept) == len(talks) else self.ranks.talks.number(kept)

    def _is_too_many_of(self, pages: int) -> bool:
        device, host = self.ranks.pages.value(pages)
        return len(device) > self.policy.n_device_pages or len(host) > self.policy.n_host_pages

    def _truth_of(self, claims: int, pages: int) -> str:
        """What the notices and the index of a turn claim falsely of these pages."""
        turn, bench = self._claims[claims], self._bench(self.ranks.ghost(pages=pages))
        for notice in turn.decision.notices:
            if isinstance(notice, BecameReady) and not is_right(turn.after, notice, bench.device):
                return WRONG_CONTENT
        return "" if is_true(turn.after, bench) else LYING_INDEX

    def _written_of(self, number: int, written: tuple[tuple[DeviceHandle, Tag], ...]) -> int:
        """The rank with what the engine has written into some pages."""
        tags, parts = dict(written), self.ranks.parts[number]
        device, host = self.ranks.pages.value(parts.pages)
        after = tuple(DevicePage(p.page, tags.get(p.page, p.tag)) for p in device)
        return self.ranks.number(parts._replace(pages=self.ranks.pages.number((after, host))))

    # Renaming, part by part where the agreed state knows all names of a part (else: -1).

    def _renamed(self, parts: Parts, turn: Turn) -> Parts:
        local = self._new_local(parts.local, turn.names)
        operations = self._new_operations(parts.operations, turn.names) if parts.operations else 0
        talks = self._new_talks(parts.talks, turn.names) if parts.talks else 0
        pages = self._new_pages(parts.pages, turn.page_names)
        if min(local, operations, talks, pages) < 0 or parts.expired or parts.echoes:
            return self.ranks.parts_of(self.renamed(self.ranks.rank(parts), turn.naming))
        return Parts(local, operations, talks, pages, parts.stored, (), 0, *parts[7:])

    def _new_local_of(self, number: int, names: int) -> int:
        shared = self._names[names]
        naming = shared.copy()
        local = renamed_local(self.ranks.locals[number], naming, self.policy, NOW_NS)
        return self.ranks.number_of_local(local) if _is_as_long(naming, shared) else -1

    def _new_operations_of(self, number: int, names: int) -> int:
        shared = self._names[names]
        naming = shared.copy()
        operations = renamed_all(self.ranks.operations.value(number), naming)
        return self.ranks.operations.number(operations) if _is_as_long(naming, shared) else -1

    def _new_talks_of(self, number: int, names: int) -> int:
        shared = self._names[names]
        naming = shared.copy()
        talks = renamed_all(self.ranks.talks.value(number), naming)
        return self.ranks.talks.number(talks) if _is_as_long(naming, shared) else -1

    def _new_pages_of(self, number: int, names: int) -> int:
        shared = self._names[names]
        naming = shared.copy()
        device, host = self.ranks.pages.value(number)
        pages: Pages = (_sorted(renamed_all(device, naming)), _sorted(renamed_all(host, naming)))
        return self.ranks.pages.number(pages) if _is_as_long(naming, shared) else -1

    def renamed(self, rank: Rank, shared: Naming) -> Rank:
        """The whole rank; names that the agreed state does not know are told apart by sign."""
        if shared.is_identity and _knows(shared, rank):
            local = renamed_local(rank.local, shared, self.policy, NOW_NS)
            return evolve(rank, local=local, device=_sorted(rank.device), host=_sorted(rank.host))
        naming = shared.copy()
        return evolve(
            rank,
            local=renamed_local(rank.local, naming, self.policy, NOW_NS),
            operations=renamed_all(rank.operations, naming),
            talks=renamed_all(rank.talks, naming),
            device=_sorted(renamed_all(rank.device, naming)),
            host=_sorted(renamed_all(rank.host, naming)),
            expired=tuple(Ticket(naming(Name.TICKET, ticket)) for ticket in rank.expired),
            echoes=renamed_all(rank.echoes, naming),
        )


def _is_as_long(naming: Naming, shared: Naming) -> bool:
    """Whether nothing was named that the shared naming does not know."""
    return all(map(_of_one_length, naming.names, shared.names))


def _of_one_length(names: dict[int, int], known: dict[int, int]) -> bool:
    return len(names) == len(known)


def _knows(naming: Naming, rank: Rank) -> bool:
    """Whether the agreed state still speaks of everything that moves on this rank."""
    known = naming.names[Name.TICKET]
    tickets = [one.ticket for one in rank.operations] + [talk.ticket for talk in rank.talks]
    return not rank.echoes and all(ticket in known for ticket in tickets)


P = TypeVar("P", DevicePage, HostPage)


def _sorted(pages: tuple[P, ...]) -> tuple[P, ...]:
    return tuple(sorted(pages, key=lambda one: one.page))
