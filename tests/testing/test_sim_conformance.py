"""The simulated ports pass the suites that the real ones pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from attrs import define, field

from kvlift.core.ids import Attempt, Rid
from kvlift.core.landed import Landed
from kvlift.core.prompt import Prompt
from kvlift.effects.ports import Peers
from kvlift.testing.sim_copies import SimCopies
from kvlift.testing.sim_memory import Content, Mode, PageValue, SimMemory, page_value
from kvlift.testing.sim_peers import Conversation, PrefillNode, Sampled, SimPeers
from kvlift.testing.sim_ranks import in_process_ranks
from kvlift.testing.sim_store import Damage, SimStore
from tests.effects.copies_conformance import CHECKS, CopiesWorld
from tests.effects.peers_conformance import Gathered, PeersConformance
from tests.effects.ranks_conformance import Group, MakeGroup, RanksConformance
from tests.effects.store_conformance import (
    ENDINGS,
    MakeWorld,
    PlainPages,
    StoreConformance,
    StoreWorld,
)

PAGE_BYTES = 64


def as_value(data: bytes) -> PageValue:
    """Any bytes as what a page holds."""
    return PageValue(b"", data)


def as_bytes(content: Content) -> bytes:
    """The reverse; poison reads as zeros."""
    return bytes(PAGE_BYTES) if content is None else content.tokens


# Copies.


@pytest.fixture
def copies_world() -> CopiesWorld:
    memory = SimMemory(n_device_pages=12, n_host_pages=12)

    def write(pool: list[Content], page: int, data: bytes) -> None:
        pool[page] = as_value(data)

    return CopiesWorld(
        copies=SimCopies(memory),
        n_host_pages=12,
        n_device_pages=12,
        page_bytes=PAGE_BYTES,
        write_host=lambda page, data: write(memory.host, page, data),
        read_host=lambda page: as_bytes(memory.host[page]),
        write_device=lambda page, data: write(memory.device, page, data),
        read_device=lambda page: as_bytes(memory.device[page]),
        settle=lambda: None,
    )


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_simulated_copies_conform(check: object, copies_world: CopiesWorld) -> None:
    assert callable(check)
    check(copies_world)


# Ranks.


@contextmanager
def _group(n_ranks: int, ballot_length: int) -> Iterator[Group]:
    yield in_process_ranks(n_ranks, deadline_s=10, ballot_length=ballot_length)


class TestSimulatedRanks(RanksConformance):
    @pytest.fixture
    def make_group(self) -> MakeGroup:
        return _group


# Store.


class SimPages(PlainPages):
    """A pool of simulated memory where the suite expects plain memory."""

    def __init__(self, pool: list[Content]) -> None:
        super().__init__(len(pool), PAGE_BYTES)
        self._pool = pool

    def fill(self, page: int, seed: int) -> bytes:
        data = super().fill(page, seed)
        self._pool[page] = as_value(data)
        return data

    def content(self, page: int) -> bytes:
        return as_bytes(self._pool[page])


@define(eq=False)
class SimStoreWorld:
    memory: SimMemory
    store: SimStore
    host: PlainPages
    device: PlainPages

    def settle(self, n_endings: int) -> list[Landed]:
        reports = self.store.landed()
        assert sum(isinstance(report, ENDINGS) for report in reports) == n_endings
        return reports

    def lose(self, prompt: Prompt, position: int) -> None:
        self.store.lose(page_value(prompt, position))

    def corrupt(self, prompt: Prompt, position: int) -> None:
        assert self.store.damage(page_value(prompt, position), Damage.CORRUPT)

    def truncate(self, prompt: Prompt, position: int) -> None:
        assert self.store.damage(page_value(prompt, position), Damage.TRUNCATED)

    def reopen(self) -> None:
        self.store = SimStore(self.memory, pages=self.store.pages)


@contextmanager
def _store_world() -> Iterator[StoreWorld]:
    memory = SimMemory(n_device_pages=16, n_host_pages=16)
    yield SimStoreWorld(memory, SimStore(memory), SimPages(memory.host), SimPages(memory.device))


class TestSimulatedStore(StoreConformance):
    @pytest.fixture
    def make_world(self) -> MakeWorld:
        return _store_world


# Peers.


@define(eq=False)
class SimPeersWorld:
    """A node that has computed as many pages as the test says, and sends them one by one."""

    node: PrefillNode
    wire: SimPeers
    peers: Peers
    memory: SimMemory
    address: str = "prefill"
    n_computed: dict[Rid, int] = field(factory=dict)
    sampled: dict[Rid, Sampled] = field(factory=dict)

    def device_page(self, page: int) -> bytes:
        return as_bytes(self.memory.device[page])

    def expected(self, rid: Rid, position: int) -> bytes:
        return page_value(self._talk(rid).prompt, position).tokens

    def compute(self, rid: Rid, attempt: Attempt, n_pages: int) -> None:
        assert attempt == 1
        self.n_computed[rid] = n_pages

    def sample(self, rid: Rid, attempt: Attempt, token: int, logprob: float) -> None:
        assert attempt == 1
        self.sampled[rid] = (token, logprob)

    def reject(self, rid: Rid, attempt: Attempt, reason: str) -> None:
        assert attempt == 1
        self.node.refuse(rid, reason, [self._talk(rid)])

    def expire(self, rid: Rid, attempt: Attempt) -> None:
        assert attempt == 1
        self.node.expire(rid, [self._talk(rid)])

    def silence(self) -> None:
        self.node.is_silent = True

    def kill(self) -> None:
        self.node.is_alive = False
        self.wire.lose_node(self.node)

    def revive(self) -> None:
        self.node.revive()

    def knows(self, rid: Rid, attempt: Attempt) -> bool:
        talk = self._talk(rid)
        return talk.attempt == attempt and self.node.is_alive and talk.is_open

    def step(self) -> None:
        """Send what is computed of what is wanted, in the order of the wants; confirm aborts."""
        if self.node.is_silent or not self.node.is_alive:
            return
        for _node, talk in self.wire.open_talks():
            if talk.is_aborted:
                self.wire.acknowledge(talk)
            while self.node.n_sendable(talk) and self._is_next_computed(talk):
                self.wire.land(talk, 1)

    def _is_next_computed(self, talk: Conversation) -> bool:
        return talk.asked[talk.n_landed][0] < self.n_computed.get(talk.rid, 0)

    def _talk(self, rid: Rid) -> Conversation:
        return next(talk for talk in reversed(self.wire.log) if talk.rid == rid)


class TestSimulatedPeers(PeersConformance):
    @pytest.fixture
    def world(self) -> SimPeersWorld:
        memory = SimMemory(n_device_pages=16, n_host_pages=0)
        node = PrefillNode("prefill", mode=Mode.HELD)
        wire = SimPeers({"prefill": node}, 0, memory)
        world = SimPeersWorld(node, wire, wire, memory)
        node.first_token = lambda rid, _prompt: world.sampled.get(rid)
        return world

    @pytest.fixture
    def got(self, world: SimPeersWorld) -> Gathered:
        return Gathered(world)
