"""Holds the claims of a world against states and steps, and remembers where each was decided."""

from collections.abc import Iterable
from typing import Generic, TypeVar, assert_never

from attrs import define, field, frozen

from kvlift.models.claim import (
    Always,
    AlwaysStep,
    Claim,
    Live,
    Move,
    Share,
    Sometimes,
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
class Judge(Generic[S]):
    """A claim leaves its list as soon as it is decided; `spots` then says where that was.

    States are met in the order of their numbers, so `ended[n]` of a live claim is about state `n`.
    """

    always: list[Always[S]] = field(factory=list, init=False)
    always_step: list[AlwaysStep[S]] = field(factory=list, init=False)
    sometimes: list[Sometimes[S]] = field(factory=list, init=False)
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

    @property
    def looks_at_steps(self) -> bool:
        """Whether a claim about steps is still open."""
        return bool(self.always_step or self.sometimes_step)

    def meet(self, number: int, state: S) -> None:
        """Hold all open claims about states against a new one."""
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
