"""The state of a world, and its tick: the real core between a ghost of each rank and a host script.

States are small tuples of numbers; the values behind the numbers are kept once (`Shelf`). Whatever
runs the core is memoised on numbers, and states are renamed after every tick, so that the core sees
each situation once, however it came about.
"""

from collections.abc import Callable, Hashable
from typing import Final, Generic, NamedTuple, TypeVar

from attrs import define, evolve, field, frozen

from kvlift.core.advance import Decision, State, advance, advance_agreed, grow_agreed
from kvlift.core.agreed import Agreed, is_under_way
from kvlift.core.ballot import Room, Verdict, from_wire, proofs, slots, to_wire
from kvlift.core.canonical import (
    Name,
    Naming,
    agreed_key,
    local_key,
    naming_of,
    renamed_agreed,
    renamed_all,
    renamed_local,
)
from kvlift.core.hear import hear, order
from kvlift.core.ids import DeviceHandle, Rid, Ticket
from kvlift.core.local import NS_PER_MS, Limits, first_deadline_ns, seen
from kvlift.core.notice import BecameReady
from kvlift.core.phase import Running
from kvlift.core.policy import Policy, Switch
from kvlift.core.submission import Finish, Retract, Submission
from kvlift.models.memo import memo
from kvlift.models.worlds.ghost import (
    DIFFERENT,
    LYING_INDEX,
    WRONG_CONTENT,
    Bench,
    DevicePage,
    HostPage,
    Rank,
    Tag,
    tag_of,
)
from kvlift.models.worlds.host import Stand
from kvlift.models.worlds.opening import Put, opened
from kvlift.models.worlds.truth import is_right, is_true
from kvlift.models.worlds.weather import Climate, delivered

V = TypeVar("V")

NOW_NS: Final = 10**15
"""All clocks stand here; a deadline passes by moving the begin of one watch into the past."""


class Now(NamedTuple):
    """A state of a world. Numbers of: agreed state, ballot on its way (-1: none), and ranks.

    `script`: where the host stands with each request. `calls`: what it has said since the last
    tick. `faults`: what is left of the budget. `n_events`: what happened since the last tick."""

    agreed: int
    ballot: int
    script: tuple[Stand, ...]
    calls: tuple[int, ...]
    ranks: tuple[int, ...]
    faults: int
    n_events: int = 0


@define
class Shelf(Generic[V]):
    """Values by number, equal keys having one number."""

    values: list[V] = field(factory=list)
    _numbers: dict[Hashable, int] = field(factory=dict)

    def number(self, key: Hashable, make: Callable[[], V]) -> int:
        number = self._numbers.get(key)
        if number is None:
            value = make()
            number = self._numbers.setdefault(key, len(self.values))
            self.values.append(value)
        return number

    def __getitem__(self, number: int) -> V:
        return self.values[number]


@frozen(kw_only=True)
class Turn:
    """A tick of the agreed half: where it led (a number), from where, and under which names."""

    before: Agreed
    verdict: Verdict | None
    calls: tuple[Submission, ...]
    after: Agreed
    decision: Decision
    naming: Naming
    number_after: int
    is_growth: bool = False


@define(eq=False)
class Stage:
    """The core, its policy, and every value that was met."""

    policy: Policy
    limits: Limits
    climate: Climate
    n_ranks: int
    agreed: Shelf[Agreed] = field(factory=Shelf, init=False)
    ranks: Shelf[Rank] = field(factory=Shelf, init=False)
    ballots: Shelf[tuple[tuple[int, ...], Agreed]] = field(factory=Shelf, init=False)
    turns: Shelf[Turn] = field(factory=Shelf, init=False)
    calls: Shelf[Submission] = field(factory=Shelf, init=False)
    arrows: set[tuple[type, type, type]] = field(factory=set, init=False)
    hear: Callable[[int], int] = field(init=False)
    decide: Callable[[int, int, tuple[int, ...]], int] = field(init=False)
    follow: Callable[[int, int], int] = field(init=False)
    vote: Callable[[int, tuple[int, ...]], int] = field(init=False)
    decode: Callable[[int, int, int], int] = field(init=False)
    grow: Callable[[int, str, int], int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.hear = memo(self._hear)
        self.decide = memo(self._decide)
        self.follow = memo(self._follow)
        self.vote = memo(self._vote)
        self.decode = memo(self._decode)
        self.grow = memo(self._grow)

    # Numbers.

    def number_of_agreed(self, agreed: Agreed) -> int:
        return self.agreed.number(agreed_key(agreed), lambda: agreed)

    def number_of_rank(self, rank: Rank) -> int:
        key = (
            local_key(rank.local),
            rank.operations,
            rank.talks,
            rank.device,
            rank.host,
            rank.stored,
            rank.expired,
            rank.echoes,
            rank.wrong,
        )
        return self.ranks.number(key, lambda: rank)

    def number_of_call(self, call: Submission) -> int:
        return self.calls.number(call, lambda: call)

    # The tick, in the order in which a driver does it.

    def tick(self, now: Now) -> tuple[Now, Decision]:
        """All ranks enter their tick together; the ballot of the last one has been reduced."""
        ranks = now.ranks
        for call in now.calls:
            if isinstance(self.calls[call], Finish | Retract):
                ranks = tuple(self.decode(rank, now.agreed, call) for rank in ranks)
        ranks = tuple(self.hear(rank) for rank in ranks)
        turn = self.decide(now.agreed, now.ballot, now.calls)
        return self._close(now, turn, ranks), self.turns[turn].decision

    def grown(self, now: Now, rid: str, n_pages: int) -> Now:
        """A growth is answered between two ticks; the ballot on its way stays what it is."""
        turn = self.grow(now.agreed, rid, n_pages)
        ranks = tuple(self.follow(rank, turn) for rank in now.ranks)
        return now._replace(agreed=self.turns[turn].number_after, ranks=ranks)

    def _close(self, now: Now, turn: int, heard: tuple[int, ...]) -> Now:
        agreed = self.turns[turn].number_after
        ranks = tuple(self.follow(rank, turn) for rank in heard)
        ballot = self.vote(agreed, ranks)
        return now._replace(agreed=agreed, ballot=ballot, calls=(), ranks=ranks, n_events=0)

    def _bench(self, rank: Rank) -> Bench:
        return Bench(rank, self.policy.n_device_pages, self.policy.n_host_pages)

    def _hear(self, number: int) -> int:
        rank, reports = delivered(self.ranks[number], self.climate)
        late = self.ranks[number].expired
        watches = {
            ticket: evolve(watch, since_ns=NOW_NS - ((watch.timeout_ms or 0) + 1) * NS_PER_MS)
            if ticket in late
            else watch
            for ticket, watch in rank.local.watches.items()
        }
        before = evolve(
            rank.local, watches=watches, deadline_ns=first_deadline_ns(watches.values())
        )
        local, starts = hear(before, self.limits, reports, NOW_NS)
        bench = self._bench(evolve(rank, local=local))
        bench.start(starts)
        return self.number_of_rank(bench.done())

    def _decide(self, agreed: int, ballot: int, calls: tuple[int, ...]) -> int:
        before = self.agreed[agreed]
        verdict = None
        if ballot >= 0:
            least, voted = self.ballots[ballot]
            verdict = from_wire(least, voted, self.policy)
        submissions = tuple(self.calls[call] for call in calls)
        after, decision = advance_agreed(before, verdict, submissions, self.policy)
        key = (agreed, ballot, calls)
        return self._turn(key, before, verdict, submissions, after, decision)

    def _turn(
        self,
        key: Hashable,
        before: Agreed,
        verdict: Verdict | None,
        calls: tuple[Submission, ...],
        after: Agreed,
        decision: Decision,
        *,
        is_growth: bool = False,
    ) -> int:
        self.arrows.update(decision.arrows)
        naming = naming_of(after)
        number = self.number_of_agreed(renamed_agreed(after, naming, self.policy))
        turn = Turn(
            before=before,
            verdict=verdict,
            calls=calls,
            after=after,
            decision=decision,
            naming=naming,
            number_after=number,
            is_growth=is_growth,
        )
        return self.turns.number(key, lambda: turn)

    def _grow(self, agreed: int, rid: str, n_pages: int) -> int:
        before = self.agreed[agreed]
        after, decision, _pages = grow_agreed(before, Rid(rid), n_pages, self.policy)
        key = (agreed, rid, n_pages)
        return self._turn(key, before, None, (), after, decision, is_growth=True)

    def _follow(self, number: int, turn_number: int) -> int:
        """One rank carries out what all have decided; its own half of `advance` runs here."""
        rank, turn = self.ranks[number], self.turns[turn_number]
        is_same = True
        if turn.is_growth or self.n_ranks == 1:
            effects, closed = turn.decision.effects, turn.decision.closed
            local, starts = order(rank.local, self.limits, effects, closed, NOW_NS)
        else:
            state, outcome = advance(
                State(agreed=turn.before, local=rank.local),
                turn.verdict,
                turn.calls,
                policy=self.policy,
                limits=self.limits,
                now_ns=NOW_NS,
            )
            local, starts = state.local, outcome.starts
            is_same = state.agreed == turn.after and outcome.decision == turn.decision
        bench = self._bench(evolve(rank, local=local))
        bench.start(starts)
        bench.forget_what_is_over()
        if not is_same:
            bench.blame(DIFFERENT)
        for notice in turn.decision.notices:
            if isinstance(notice, BecameReady) and not is_right(turn.after, notice, bench.device):
                bench.blame(WRONG_CONTENT)
        if not is_true(turn.after, bench):
            bench.blame(LYING_INDEX)
        return self.number_of_rank(self._renamed(bench.done(), turn.naming))

    def _renamed(self, rank: Rank, shared: Naming) -> Rank:
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

    def _vote(self, agreed: int, ranks: tuple[int, ...]) -> int:
        state = self.agreed[agreed]
        if not is_under_way(state):
            return -1
        tickets = slots(state, self.policy)
        room = Room(device=self.policy.n_device_pages, host=self.policy.n_host_pages)
        ballots = [
            to_wire(
                proofs(state),
                self.policy,
                room=room,
                rates=self.ranks[rank].local.rates,
                is_healthy=True,
                n_submissions=0,
                seen=seen(self.ranks[rank].local, tickets),
            )
            for rank in ranks
        ]
        least = tuple(map(min, zip(*ballots, strict=True)))
        return self.ballots.number((least, agreed), lambda: (least, state))

    def _decode(self, number: int, agreed: int, call_number: int) -> int:
        """The engine has written the KV of what it decoded into the request's own pages."""
        rank, call = self.ranks[number], self.calls[call_number]
        assert isinstance(call, Finish | Retract)
        state = self.agreed[agreed]
        attempt = state.attempt_by_rid.get(call.rid)
        request = None if attempt is None else state.requests[attempt]
        if request is None or not isinstance(request.phase, Running):
            return number
        whole = request.prompt.first_tokens(request.n_tokens_prompt).with_tokens(call.output)
        n_with_kv = max(request.n_tokens_prompt, whole.n_tokens - 1)
        written = whole.first_tokens(n_with_kv)
        lease = request.phase.lease
        tags: dict[DeviceHandle, Tag] = {}
        for at, page in enumerate(lease.own, lease.n_shared):
            if at < written.n_pages:
                tags[page] = tag_of(written, at)
        device = tuple(DevicePage(p.page, tags.get(p.page, p.tag)) for p in rank.device)
        return self.number_of_rank(evolve(rank, device=device))

    def opening(self, puts: tuple[Put, ...], storage: Switch) -> tuple[int, tuple[int, ...]]:
        """The agreed state and the ranks with some pages in place already."""
        agreed, ranks = opened(self.policy, puts, storage, self.n_ranks)
        naming = naming_of(agreed)
        number = self.number_of_agreed(renamed_agreed(agreed, naming, self.policy))
        return number, tuple(self.number_of_rank(self._renamed(rank, naming)) for rank in ranks)


def _knows(naming: Naming, rank: Rank) -> bool:
    """Whether the agreed state still speaks of everything that moves on this rank."""
    known = naming.names[Name.TICKET]
    tickets = [one.ticket for one in rank.operations] + [talk.ticket for talk in rank.talks]
    return not rank.echoes and all(ticket in known for ticket in tickets)


P = TypeVar("P", DevicePage, HostPage)


def _sorted(pages: tuple[P, ...]) -> tuple[P, ...]:
    return tuple(sorted(pages, key=lambda one: one.page))
