"""What every `Peers` port must do, real or simulated.

Subclass `PeersConformance` and give it a fixture `world` that yields a `PeersWorld`.
"""

import time
from collections.abc import Callable
from typing import Protocol

import pytest

from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.landed import (
    Landed,
    PagesArrived,
    PeerCause,
    PeerFailed,
    PeerLetGo,
    TokenArrived,
)
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.effects.ports import Peers

PAGE_TOKENS = 4


class PeersWorld(Protocol):
    """A `Peers` port with one prefill node behind `address`, and hands on both ends."""

    peers: Peers
    address: str

    def device_page(self, page: int) -> bytes:
        """What a device page holds; all zeros at first."""

    def expected(self, rid: Rid, position: int) -> bytes:
        """The bytes that the prefill node has for a page; never all zeros."""

    def compute(self, rid: Rid, attempt: Attempt, n_pages: int) -> None:
        """The node now has the pages [0, n_pages) of a request that it has heard of."""

    def sample(self, rid: Rid, attempt: Attempt, token: int, logprob: float) -> None:
        """The node has the first token."""

    def reject(self, rid: Rid, attempt: Attempt, reason: str) -> None: ...

    def expire(self, rid: Rid, attempt: Attempt) -> None:
        """The node's lease for this request ends now."""

    def silence(self) -> None:
        """The node does nothing from now on; its connection stays."""

    def kill(self) -> None: ...

    def revive(self) -> None:
        """A new node at the same address; it knows of nothing."""

    def knows(self, rid: Rid, attempt: Attempt) -> bool:
        """Whether the node holds this request now."""

    def step(self) -> None:
        """Let a little time pass."""


def prompt_of(n_pages: int, seed: int = 1) -> Prompt:
    tokens = token_bytes([seed * 1_000 + at for at in range(n_pages * PAGE_TOKENS)])
    return Prompt(bytes(32), tokens, PAGE_TOKENS)


class Gathered:
    """The reports of a world so far, and waiting for more of them."""

    def __init__(self, world: PeersWorld) -> None:
        self.world = world
        self.reports: list[Landed] = []

    def until(self, holds: Callable[[], bool], what: str, timeout_s: float = 8.0) -> None:
        until = time.monotonic() + timeout_s
        while True:
            self.reports += self.world.peers.landed()
            if holds():
                return
            assert time.monotonic() < until, f"{what} did not come to pass; got {self.reports}"
            self.world.step()

    def quiet(self, n_steps: int = 20) -> None:
        for _ in range(n_steps):
            self.world.step()
            self.reports += self.world.peers.landed()

    def n_pages(self, ticket: int) -> int:
        counts = [
            one.n_pages
            for one in self.reports
            if isinstance(one, PagesArrived) and one.ticket == ticket
        ]
        assert counts == sorted(counts), "counts are cumulative"
        return counts[-1] if counts else 0

    def failures(self, ticket: int) -> list[PeerFailed]:
        return [one for one in self.reports if isinstance(one, PeerFailed) and one.ticket == ticket]

    def n_let_go(self, ticket: int) -> int:
        return sum(isinstance(one, PeerLetGo) and one.ticket == ticket for one in self.reports)

    def until_pages(self, ticket: int, n_pages: int) -> None:
        self.until(lambda: self.n_pages(ticket) >= n_pages, f"{n_pages} pages of {ticket}")
        assert self.n_pages(ticket) == n_pages

    def until_let_go(self, ticket: int) -> None:
        self.until(lambda: self.n_let_go(ticket) > 0, f"letting go of {ticket}")


@pytest.fixture
def got(world: PeersWorld) -> Gathered:
    return Gathered(world)


T1, T2 = Ticket(1), Ticket(2)
R1, R2 = Rid("one"), Rid("two")
A1 = Attempt(1)


class PeersConformance:
    """The contract of `kvlift.effects.ports.Peers`, as far as both ends can show it."""

    def hold(
        self,
        world: PeersWorld,
        got: Gathered,
        ticket: Ticket = T1,
        rid: Rid = R1,
        n_pages: int = 8,
    ) -> None:
        world.peers.send_hold(ticket, rid, A1, world.address, prompt_of(n_pages))
        got.until(lambda: world.knows(rid, A1), "the hold")

    def test_pages_arrive_as_they_are_computed_at_the_places_that_were_named(
        self, world: PeersWorld, got: Gathered
    ) -> None:
        self.hold(world, got)
        world.peers.send_want(T1, 2, [7, 3, 5, 1, 0, 2], 2)
        world.compute(R1, A1, 4)
        got.until_pages(T1, 2)
        assert world.device_page(7) == world.expected(R1, 2)
        assert world.device_page(3) == world.expected(R1, 3)
        assert not any(world.device_page(5))
        world.compute(R1, A1, 8)
        got.until_pages(T1, 6)
        for position, place in enumerate([7, 3, 5, 1, 0, 2], 2):
            assert world.device_page(place) == world.expected(R1, position)
        assert got.failures(T1) == []

    def test_a_second_want_widens_and_its_pages_are_counted_after_the_first(
        self, world: PeersWorld, got: Gathered
    ) -> None:
        self.hold(world, got)
        world.peers.send_want(T1, 6, [6, 7], 6)
        world.peers.send_want(T1, 4, [4, 5], 4)
        world.compute(R1, A1, 6)
        got.quiet()
        assert got.n_pages(T1) == 0, "pages 4 and 5 were asked for after 6 and 7"
        world.compute(R1, A1, 8)
        got.until_pages(T1, 4)
        for place in (4, 5, 6, 7):
            assert world.device_page(place) == world.expected(R1, place)

    def test_a_want_of_no_page_still_brings_the_first_token(
        self, world: PeersWorld, got: Gathered
    ) -> None:
        self.hold(world, got)
        world.peers.send_want(T1, 8, [], 8)
        world.sample(R1, A1, 42, -0.25)
        got.until(lambda: bool(got.reports), "the token")
        assert got.reports == [TokenArrived(T1, 42, -0.25)]

    def test_committed_ends_the_ticket_without_an_answer(
        self, world: PeersWorld, got: Gathered
    ) -> None:
        self.hold(world, got)
        world.peers.send_want(T1, 0, list(range(8)), 0)
        world.compute(R1, A1, 8)
        got.until_pages(T1, 8)
        world.peers.send_committed(T1)
        got.until(lambda: not world.knows(R1, A1), "the end at the node")
        world.kill()
        got.quiet()
        assert got.failures(T1) == []
        assert got.n_let_go(T1) == 0

    def test_an_aborted_ticket_is_let_go_once_and_writes_nothing_afterwards(
        self, world: PeersWorld, got: Gathered
    ) -> None:
        self.hold(world, got)
        world.peers.send_want(T1, 0, list(range(8)), 0)
        world.compute(R1, A1, 3)
        got.until_pages(T1, 3)
        world.peers.send_aborted(T1)
        got.until_let_go(T1)
        got.until(lambda: not world.knows(R1, A1), "the end at the node")
        world.compute(R1, A1, 8)
        got.quiet()
        assert got.n_pages(T1) == 3
        assert not any(world.device_page(3))
        assert got.n_let_go(T1) == 1
        assert got.failures(T1) == []

    def test_a_rejection_carries_its_reason_and_the_name_of_the_peer(
        self, world: PeersWorld, got: Gathered
    ) -> None:
        self.hold(world, got)
        world.peers.send_want(T1, 0, [0], 0)
        world.reject(R1, A1, "no such adapter")
        got.until(lambda: bool(got.failures(T1)), "the rejection")
        (failure,) = got.failures(T1)
        assert failure.cause is PeerCause.REFUSED
        assert "no such adapter" in failure.reason
        assert world.address in failure.reason

    def test_asking_for_more_after_the_lease_has_ended_is_gone(
        self, world: PeersWorld, got: Gathered
    ) -> None:
        self.hold(world, got)
        world.peers.send_want(T1, 7, [7], 7)
        world.compute(R1, A1, 8)
        got.until_pages(T1, 1)
        world.expire(R1, A1)
        got.quiet()
        assert got.failures(T1) == [], "all that was asked for is here"
        world.peers.send_want(T1, 6, [6], 6)
        got.until(lambda: bool(got.failures(T1)), "the answer")
        assert got.failures(T1)[0].cause is PeerCause.GONE

    def test_a_dead_peer_fails_all_its_tickets_and_lets_them_go(
        self, world: PeersWorld, got: Gathered
    ) -> None:
        self.hold(world, got, T1, R1)
        self.hold(world, got, T2, R2)
        world.peers.send_want(T1, 0, [0, 1], 0)
        world.compute(R1, A1, 1)
        got.until_pages(T1, 1)
        world.kill()
        for ticket in (T1, T2):
            got.until_let_go(ticket)
            (failure,) = got.failures(ticket)
            assert failure.cause is PeerCause.LOST
            assert world.address in failure.reason

    def test_a_revived_peer_serves_new_holds(self, world: PeersWorld, got: Gathered) -> None:
        self.hold(world, got)
        world.kill()
        got.until_let_go(T1)
        world.revive()
        self.hold(world, got, T2, R2)
        world.peers.send_want(T2, 0, [0], 0)
        world.compute(R2, A1, 1)
        got.until_pages(T2, 1)

    def test_closing_a_silent_peer_is_the_proof_that_nothing_is_written(
        self, world: PeersWorld, got: Gathered
    ) -> None:
        self.hold(world, got, T1, R1)
        self.hold(world, got, T2, R2)
        world.peers.send_want(T1, 0, [0, 1], 0)
        world.silence()
        world.peers.send_aborted(T1)
        got.quiet()
        assert got.n_let_go(T1) == 0, "an abort alone proves nothing"
        world.peers.close_peer(T1)
        got.until_let_go(T1)
        got.until_let_go(T2)
        assert got.failures(T1) == [], "it had ended for us already"
        assert got.failures(T2)[0].cause is PeerCause.LOST

    def test_what_is_said_about_an_unknown_ticket_changes_nothing(
        self, world: PeersWorld, got: Gathered
    ) -> None:
        stranger = Ticket(99)
        world.peers.send_want(stranger, 0, [0], 0)
        world.peers.send_committed(stranger)
        world.peers.close_peer(stranger)
        self.hold(world, got)
        world.peers.send_want(T1, 0, [0], 0)
        world.compute(R1, A1, 1)
        got.until_pages(T1, 1)
        assert all(report.ticket == T1 for report in got.reports)
