"""Holds the claims of a world against states and steps, and remembers where each was decided."""

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar, assert_never

from attrs import define, field, frozen

from kvlift.models.claim import (
    Always,
    AlwaysOf,
    AlwaysStep,
    Claim,
    Live,
    Move,
    Share,
    Sometimes,
    SometimesOf,
    SometimesStep,
)

S = TypeVar("S")


@frozen
class Spot(Generic[S]):
    """Where a claim was decided: in the state of this number, or on a move out of it."""

    number: int
    move: Move[S] | None = None
    note: str = ""


@define
class Group(Generic[S]):
    """The open claims about one kind of part, and the parts that they were held against."""

    parts: Callable[[S], Iterable[Hashable]]
    always: list[AlwaysOf[S]] = field(factory=list, init=False)
    sometimes: list[SometimesOf[S]] = field(factory=list, init=False)
    seen: set[Hashable] = field(factory=set, init=False)


@define
class Judge(Generic[S]):
    """A claim leaves its list as soon as it is decided; `spots` then says where that was.

    States are met in the order of their numbers, so `ended[n]` of a live claim is about state `n`.
    """

    always: list[Always[S]] = field(factory=list, init=False)
    always_step: list[AlwaysStep[S]] = field(factory=list, init=False)
    sometimes: list[Sometimes[S]] = field(factory=list, init=False)
    groups: list[Group[S]] = field(factory=list, init=False)
    sometimes_step: list[SometimesStep[S]] = field(factory=list, init=False)
    live: list[tuple[Live[S], bytearray]] = field(factory=list, init=False)
    shares: list[tuple[Share[S], list[int]]] = field(factory=list, init=False)
    spots: dict[str, Spot[S]] = field(factory=dict, init=False)
    is_violated: bool = field(default=False, init=False)

    def take(self, claims: Iterable[Claim[S]]) -> None:
        """Sort the claims by kind."""
        for claim in claims:
            match claim:
                case Always():
                    self.always.append(claim)
                case AlwaysOf():
                    self._group_of(claim).always.append(claim)
                case SometimesOf():
                    self._group_of(claim).sometimes.append(claim)
                case AlwaysStep():
                    self.always_step.append(claim)
                case Sometimes():
                    self.sometimes.append(claim)
                case SometimesStep():
                    self.sometimes_step.append(claim)
                case Live():
                    self.live.append((claim, bytearray()))
                case Share():
                    self.shares.append((claim, [0, 0]))
                case _:
                    assert_never(claim)

    def _group_of(self, claim: AlwaysOf[S] | SometimesOf[S]) -> Group[S]:
        for group in self.groups:
            if group.parts == claim.parts:
                return group
        self.groups.append(Group(claim.parts))
        return self.groups[-1]

    @property
    def looks_at_steps(self) -> bool:
        """Whether a claim about steps is still open."""
        return bool(self.always_step or self.sometimes_step)

    def meet(self, number: int, state: S) -> None:
        """Hold all open claims about states against a new one."""
        for group in self.groups:
            seen = group.seen
            for part in group.parts(state):
                if part not in seen:
                    seen.add(part)
                    self._meet_part(number, group, part)
        for always in self.always:
            if not always.holds(state):
                self.violate(always.name, Spot(number))
                self.always = [other for other in self.always if other is not always]
        for sometimes in self.sometimes:
            if sometimes.holds(state):
                self.spots[sometimes.name] = Spot(number)
                self.sometimes = [other for other in self.sometimes if other is not sometimes]
        for live, ended in self.live:
            ended.append(live.ended(state))
        for share, sums in self.shares:
            sums[0] += share.n_good(state)
            sums[1] += share.n_counted(state)

    def _meet_part(self, number: int, group: Group[S], part: Hashable) -> None:
        """Hold the open claims of a group against a new part of a state."""
        for always in list(group.always):
            if not always.holds(part):
                self.violate(always.name, Spot(number))
                group.always.remove(always)
        for sometimes in list(group.sometimes):
            if sometimes.holds(part):
                self.spots[sometimes.name] = Spot(number)
                group.sometimes.remove(sometimes)

    def look(self, number: int, state: S, move: Move[S]) -> None:
        """Hold all open claims about steps against one."""
        for always in self.always_step:
            if not always.holds(state, move, move.next):
                self.violate(always.name, Spot(number, move))
                self.always_step = [other for other in self.always_step if other is not always]
        for sometimes in self.sometimes_step:
            if sometimes.holds(state, move, move.next):
                self.spots[sometimes.name] = Spot(number, move)
                self.sometimes_step = [
                    other for other in self.sometimes_step if other is not sometimes
                ]

    def violate(self, name: str, spot: Spot[S]) -> None:
        """A claim is broken here. The first place stays: it is the nearest to the start."""
        self.spots.setdefault(name, spot)
        self.is_violated = True

    def excuse(self, number: int) -> None:
        """Nothing follows this state because the core raised in it: it is not stuck as well."""
        for _, ended in self.live:
            ended[number] = 1
