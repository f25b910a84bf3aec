"""What a prefill node knows of one request: who holds it, what is wanted, what may be sent.

Plain state, without sockets, clocks or threads. A request has one side per decode rank:

    ABSENT -> OPEN -> COMMITTED | ABORTED | LEASE_ENDED | LOST | REJECTED

It is over when no side is absent or open. Pages are sent to a rank in the order in which they were
asked for, and only what the wants of all ranks agree on.
"""

import enum
from collections import deque
from typing import TypeAlias

import zmq
from attrs import define, field, frozen

from kvlift.core.ids import Attempt, Rid
from kvlift.core.prompt import Prompt
from kvlift.effects import wire
from kvlift.runtime.prefill_sessions import Session

Key: TypeAlias = tuple[Rid, Attempt]

WANTS_MAX = 256
"""Wants of one rank for one request. Each widening moves a boundary, so few are ever needed."""


class How(enum.Enum):
    """How a request ended on the prefill node."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    LEASE_ENDED = "lease_ended"
    LOST = "lost"
    """A decode rank's connection is gone, or the rank has begun a new life."""
    REJECTED = "rejected"
    CLOSED = "closed"
    """The node itself was closed."""


class SideState(enum.Enum):
    ABSENT = enum.auto()
    OPEN = enum.auto()
    COMMITTED = enum.auto()
    ABORTED = enum.auto()
    LEASE_ENDED = enum.auto()
    LOST = enum.auto()
    REJECTED = enum.auto()


@frozen
class Asked:
    """A request that a decode worker holds here, for the engine: compute this prompt's KV."""

    rid: Rid
    attempt: Attempt
    prompt: Prompt
    n_ranks: int


@frozen
class Ended:
    """Nothing reads this request's pages any more: the engine may free them."""

    rid: Rid
    attempt: Attempt
    how: How


@frozen
class StagedPage:
    """A page that is ready to go out and was not taken by the connection yet."""

    message: wire.Page
    data: memoryview


@define(eq=False)
class Side:
    """One rank's side of a request."""

    state: SideState = SideState.ABSENT
    session: Session | None = None
    wants: list[wire.Want] = field(factory=list)
    unsent: deque[int] = field(factory=deque)
    staged: StagedPage | None = None
    has_token: bool = False
    is_queued: bool = False
    """It stands in its session's line of those that have a page to send."""

    def close(self, state: SideState) -> None:
        """Nothing more is sent to this rank."""
        self.state = state
        self.unsent.clear()
        self.staged = None


@define(eq=False)
class Request:
    rid: Rid
    attempt: Attempt
    prompt: Prompt
    group: str
    asked_s: float
    sides: list[Side]
    n_ready: int = 0
    first: wire.FirstToken | None = None
    rejected: str | None = None
    in_flight: deque[zmq.MessageTracker] = field(factory=deque)
    is_reported: bool = False
    _n_wants_agreed: int = 0
    _agreed_positions: set[int] = field(factory=set)

    @property
    def key(self) -> Key:
        return self.rid, self.attempt

    @property
    def n_ranks(self) -> int:
        return len(self.sides)

    def open_sides(self) -> list[Side]:
        return [side for side in self.sides if side.state is SideState.OPEN]

    def is_over(self) -> bool:
        return not any(side.state in (SideState.ABSENT, SideState.OPEN) for side in self.sides)

    def is_released(self) -> bool:
        """Whether libzmq has let go of every page that it was given."""
        while self.in_flight and self.in_flight[0].done:
            self.in_flight.popleft()
        return not self.in_flight

    def how(self) -> How:
        if self.rejected is not None:
            return How.REJECTED
        states = {side.state for side in self.sides}
        for state, how in (
            (SideState.LEASE_ENDED, How.LEASE_ENDED),
            (SideState.LOST, How.LOST),
            (SideState.ABORTED, How.ABORTED),
            (SideState.COMMITTED, How.COMMITTED),
        ):
            if state in states:
                return how
        return How.CLOSED

    def hold_fault(self, session: Session, hold: wire.Hold, tokens: memoryview) -> str | None:
        """Why this rank can't join the request; None where it can."""
        if session.hello.group != self.group:
            return "another decode worker uses this request id and attempt here"
        if session.hello.n_ranks != self.n_ranks:
            return f"{session.hello.n_ranks} ranks said by one rank, {self.n_ranks} by another"
        if self.prompt.page_tokens != hold.page_tokens or self.prompt.tokens != tokens:
            return "the ranks hold different prompts under one request id and attempt"
        side = self.sides[session.hello.rank]
        if side.session is not None and side.session is not session:
            return "another connection holds this rank's side of the request"
        return None

    def want_fault(self, rank: int, want: wire.Want) -> str | None:
        """Why this want can't be served; None where it was noted."""
        n_pages = self.prompt.n_pages
        if want.start + want.n_pages > n_pages or want.promise > n_pages:
            return f"rank {rank} wants {_said(want)} of a prompt of {n_pages} pages"
        side = self.sides[rank]
        if len(side.wants) >= WANTS_MAX:
            return f"rank {rank} has widened {WANTS_MAX} times"
        index = len(side.wants)
        side.wants.append(want)
        for other, its in enumerate(self.sides):
            if len(its.wants) > index and its.wants[index] != want:
                told = f"rank {other} {_said(its.wants[index])}"
                return f"the ranks want different pages: rank {rank} {_said(want)}, {told}"
        return None

    def agree(self) -> str | None:
        """Put what all ranks want into every rank's line. Why not, where wants overlap."""
        while all(len(side.wants) > self._n_wants_agreed for side in self.sides):
            want = self.sides[0].wants[self._n_wants_agreed]
            positions = range(want.start, want.start + want.n_pages)
            if not self._agreed_positions.isdisjoint(positions):
                return f"{_said(want)} were wanted before, at least in part"
            self._agreed_positions.update(positions)
            self._n_wants_agreed += 1
            for side in self.open_sides():
                side.unsent.extend(positions)
        return None

    def has_sendable(self, side: Side) -> bool:
        if side.state is not SideState.OPEN or self.rejected is not None:
            return False
        return bool(side.unsent) and side.unsent[0] < self.n_ready


def _said(want: wire.Want) -> str:
    return f"pages [{want.start}, {want.start + want.n_pages}) with promise {want.promise}"
