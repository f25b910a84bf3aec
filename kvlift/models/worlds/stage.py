"""The state of a world, and its tick: the real core between a ghost of each rank and a host script.

States are small tuples of numbers; the values behind the numbers are kept once. Whatever runs the
core is memoised on numbers, and states are renamed after every tick, so that the core sees each
situation once, however it came about.
"""

from collections.abc import Callable, Hashable
from struct import Struct
from typing import NamedTuple

from attrs import define, field

from kvlift.core.advance import Decision, advance_agreed, grow_agreed
from kvlift.core.agreed import Agreed, is_under_way
from kvlift.core.ballot import N_HEADER, Room, Verdict, from_wire, proofs, slots, to_wire
from kvlift.core.canonical import Naming, agreed_key, naming_of, renamed_agreed
from kvlift.core.ids import DeviceHandle, Rid
from kvlift.core.local import Limits, seen
from kvlift.core.observation import N_INTS
from kvlift.core.phase import Running
from kvlift.core.policy import Policy, Switch
from kvlift.core.submission import Finish, Retract, Submission
from kvlift.models.memo import Numbered, memo
from kvlift.models.worlds.cast import Cast, Turn
from kvlift.models.worlds.ghost import Aside, Tag, tag_of
from kvlift.models.worlds.host import Stand
from kvlift.models.worlds.opening import Put, opened
from kvlift.models.worlds.shelf import Ranks, Shelf
from kvlift.models.worlds.sky import Sky
from kvlift.models.worlds.weather import Climate


class Now(NamedTuple):
    """A state of a world. Numbers of: agreed state, ballot on its way (-1: none), script, ranks.

    `script`: where the host stands with each request. `calls`: what it has said since the last
    tick. `faults`: what is left of the budget. `n_events`: what happened since the last tick."""

    agreed: int
    ballot: int
    script: int
    calls: tuple[int, ...]
    ranks: tuple[int, ...]
    faults: int
    n_events: int = 0


@define(eq=False)
class Stage:
    """The core, its policy, and every value that was met."""

    policy: Policy
    limits: Limits
    climate: Climate
    n_ranks: int
    agreed: Shelf[Agreed] = field(factory=Shelf, init=False)
    wires: Numbered[tuple[int, ...]] = field(factory=Numbered, init=False)
    ballots: Shelf[tuple[tuple[int, ...], Agreed]] = field(factory=Shelf, init=False)
    turns: Shelf[Turn] = field(factory=Shelf, init=False)
    calls: Shelf[Submission] = field(factory=Shelf, init=False)
    scripts: Numbered[tuple[Stand, ...]] = field(factory=Numbered, init=False)
    said: Numbered[tuple[int, ...]] = field(factory=Numbered, init=False)
    arrows: set[tuple[type, type, type]] = field(factory=set, init=False)
    cast: Cast = field(init=False)
    sky: Sky = field(init=False)
    _pack: Callable[..., bytes] = field(init=False)
    decide: Callable[[int, int, tuple[int, ...]], int] = field(init=False)
    vote: Callable[[int, tuple[int, ...]], int] = field(init=False)
    wire: Callable[[int, int, Aside], int] = field(init=False)
    reduce: Callable[[int, tuple[int, ...]], int] = field(init=False)
    decode: Callable[[int, int, int], int] = field(init=False)
    grow: Callable[[int, str, int], int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.said.number(())
        self._pack = Struct(f"<IiIIHH{self.n_ranks}I").pack
        self.cast = Cast(self.policy, self.limits, self.climate, self.n_ranks, self.turns)
        self.sky = Sky(self.climate, self.cast.ranks)
        self.decide = memo(self._decide)
        self.vote = memo(self._vote)
        self.wire = memo(self._wire)
        self.reduce = memo(self._reduce)
        self.decode = memo(self._decode)
        self.grow = memo(self._grow)

    # Numbers.

    @property
    def ranks(self) -> Ranks:
        return self.cast.ranks

    def number_of_agreed(self, agreed: Agreed) -> int:
        return self.agreed.number(agreed_key(agreed), lambda: agreed)

    def renamed_agreed(self, agreed: Agreed, naming: Naming) -> Agreed:
        """The agreed state under its new names, without what no future depends on."""
        return renamed_agreed(agreed, naming, self.policy)

    def number_of_call(self, call: Submission) -> int:
        return self.calls.number(call, lambda: call)

    def packed(self, now: Now) -> bytes:
        """All of a state in a few bytes: millions of keys are kept. Not a digest: two states never
        have the same bytes."""
        agreed, ballot, script, calls, ranks, faults, n_events = now
        said = self.said.number(calls) if calls else 0
        return self._pack(agreed, ballot, script, said, faults, n_events, *ranks)

    def parts_in_local(self, now: Now) -> list[tuple[int, int]]:
        """(agreed state, local half) of each rank, in numbers."""
        parts = self.ranks.parts
        return [(now.agreed, parts[rank].local) for rank in now.ranks]

    # The tick, in the order in which a driver does it.

    def tick(self, now: Now) -> tuple[Now, Decision]:
        """All ranks enter their tick together; the ballot of the last one has been reduced."""
        ranks = now.ranks
        for call in now.calls:
            if isinstance(self.calls[call], Finish | Retract):
                ranks = tuple([self.decode(rank, now.agreed, call) for rank in ranks])
        hear, follow = self.cast.hear, self.cast.follow
        number = self.decide(now.agreed, now.ballot, now.calls)
        ranks = tuple([follow(hear(rank), number) for rank in ranks])
        turn = self.turns[number]
        agreed = turn.number_after
        after = Now(agreed, self.vote(agreed, ranks), now.script, (), ranks, now.faults, 0)
        return after, turn.decision

    def grown(self, now: Now, rid: str, n_pages: int) -> Now:
        """A growth is answered between two ticks; the ballot on its way stays what it is."""
        turn = self.grow(now.agreed, rid, n_pages)
        ranks = tuple(self.cast.follow(rank, turn) for rank in now.ranks)
        return now._replace(agreed=self.turns[turn].number_after, ranks=ranks)

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
        number = self.number_of_agreed(self.renamed_agreed(after, naming))
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
        return self.turns.number(key, lambda: self.cast.numbered(turn))

    def _grow(self, agreed: int, rid: str, n_pages: int) -> int:
        before = self.agreed[agreed]
        after, decision, _pages = grow_agreed(before, Rid(rid), n_pages, self.policy)
        return self.turn_between((agreed, rid, n_pages), before, after, decision)

    def turn_between(self, key: Hashable, before: Agreed, after: Agreed, decision: Decision) -> int:
        """What is decided between two ticks, without a verdict: its number."""
        return self._turn(key, before, None, (), after, decision, is_growth=True)

    def _vote(self, agreed: int, ranks: tuple[int, ...]) -> int:
        state = self.agreed[agreed]
        if not is_under_way(state):
            return -1
        parts = self.ranks.parts
        wires = sorted({self.wire(agreed, parts[rank].local, parts[rank].aside) for rank in ranks})
        return self.reduce(agreed, tuple(wires))

    def _reduce(self, agreed: int, wires: tuple[int, ...]) -> int:
        """The ballot that comes back: the least of each place; those of unused slots are equal."""
        ballots = [self.wires.value(wire) for wire in wires]
        least, state = ballots[0], self.agreed[agreed]
        if len(ballots) > 1:
            n_used = N_HEADER + N_INTS * len(slots(state, self.policy))
            used = zip(*(ballot[:n_used] for ballot in ballots), strict=True)
            least = (*map(min, used), *least[n_used:])
        return self.ballots.number((least, agreed), lambda: (least, state))

    def _wire(self, agreed: int, local: int, aside: Aside) -> int:
        """The ballot of a rank; `local` and `aside`: all that it depends on."""
        state, here = self.agreed[agreed], self.ranks.locals[local]
        device, host = aside
        room = Room(
            device=self.policy.n_device_pages - device, host=self.policy.n_host_pages - host
        )
        wire = to_wire(
            proofs(state),
            self.policy,
            room=room,
            rates=here.rates,
            is_healthy=True,
            n_submissions=0,
            seen=seen(here, slots(state, self.policy)),
        )
        return self.wires.number(wire)

    def _decode(self, number: int, agreed: int, call_number: int) -> int:
        """The engine has written the KV of what it decoded into the request's own pages."""
        call, state = self.calls[call_number], self.agreed[agreed]
        assert isinstance(call, Finish | Retract)
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
        return self.cast.written(number, tuple(tags.items()))

    def opening(self, puts: tuple[Put, ...], storage: Switch) -> tuple[int, tuple[int, ...]]:
        """The agreed state and the ranks with some pages in place already."""
        agreed, ranks = opened(self.policy, puts, storage, self.n_ranks)
        naming = naming_of(agreed)
        number = self.number_of_agreed(self.renamed_agreed(agreed, naming))
        renamed = [self.cast.renamed(rank, naming) for rank in ranks]
        return number, tuple(self.ranks.number_of(rank) for rank in renamed)
