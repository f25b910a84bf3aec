"""A host that owns the device's pages: leases before blocks, blocks before copies, references."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from kvlift.core.agreed import Rates
from kvlift.core.ballot import Room, to_wire
from kvlift.core.effect import (
    Effect,
    SendAborted,
    SendCommitted,
    SendHold,
    SendWant,
    StartLookup,
    StartMirror,
    StartPersist,
    StartPrefetch,
    StartRestore,
)
from kvlift.core.ids import Ticket
from kvlift.core.invariants import breaches
from kvlift.core.keys import Namespace
from kvlift.core.landed import PeerCause
from kvlift.core.observation import Observation
from kvlift.core.policy import Switch
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.runtime.config import Config, ConfigError
from kvlift.runtime.errors import UnknownRequest
from kvlift.runtime.hosted import Orders
from kvlift.runtime.lending import LendingScheduler
from kvlift.runtime.tick import Tick

PAGE = 4
SPACE = Namespace(model="m", page_tokens=PAGE).digest()


def prompt(n_tokens: int) -> Prompt:
    return Prompt(SPACE, token_bytes(range(n_tokens)), PAGE)


class World:
    """A scheduler, and what its one worker would say; `held` counts references by block."""

    def __init__(self, *, storage: Switch = Switch.ON, **fields: object) -> None:
        self.held: Counter[int] = Counter()
        given: dict[str, object] = {
            "page_tokens": PAGE,
            "device_pages": 1 << 20,
            "host_pages": 16,
            "device_tier": "off",
            "first_token": "off",
            "decode_reserve_pages": 0,
            "prefetch_min_pages": 1,
        }
        self.core = LendingScheduler(
            Config.parse({**given, **fields}),
            storage=storage,
            held=self.held.update,
            released=self.held.subtract,
        )
        self.seen: dict[Ticket, Observation] = {}
        self.sent: list[Effect] = []
        self.orders: Orders | None = None

    def tick(self, seen: Mapping[Ticket, Observation] | None = None) -> Tick:
        """One round; the worker has seen `seen` beside what it saw before."""
        self.seen.update(seen or {})
        ballots: list[Sequence[int]] = []
        if self.orders is not None and self.orders.is_awaited:
            known = self.core.state.agreed.tickets
            said = [self.seen.get(t) or self._nothing_new(t) for t in self.orders.tickets]
            assert len(known) >= len(self.orders.tickets)
            ballots = [
                to_wire(
                    self.orders.proofs,
                    self.core.config.policy(),
                    room=Room(device=1 << 20, host=self.core.config.host_pages),
                    rates=Rates(),
                    is_healthy=True,
                    n_submissions=0,
                    seen=tuple(said),
                )
            ]
        tick, self.orders = self.core.tick(ballots)
        self.sent += self.orders.effects
        assert breaches(self.core.state.agreed) == ()
        return tick

    def _nothing_new(self, ticket: Ticket) -> Observation:
        """Of a ticket that was ordered; of others a worker knows nothing, and says zeros."""
        is_ordered = any(ticket in _tickets(effect) for effect in self.sent)
        n_pages = self.core.state.agreed.tickets[ticket].n_pages
        return Observation(0, 0, n_pages if is_ordered else 0)

    def only(self, kind: type[Effect]) -> list[Effect]:
        return [effect for effect in self.sent if type(effect) is kind]

    def down(self, n_pages: int) -> None:
        """Pages [0, n_pages) of the prompt go to the host and to storage."""
        self.core.stow(prompt(n_pages * PAGE), 0, list(range(100, 100 + n_pages)))
        self.tick()
        mirror = self.only(StartMirror)[-1]
        assert isinstance(mirror, StartMirror)
        self.tick({mirror.ticket: Observation(n_pages, 1, n_pages)})
        persist = self.only(StartPersist)[-1]
        assert isinstance(persist, StartPersist)
        self.tick({persist.ticket: Observation(n_pages, 1, n_pages)})
        self.tick()

    def n_held(self) -> int:
        return sum(self.held.values())


def _tickets(effect: Effect) -> tuple[Ticket, ...]:
    found = [getattr(effect, name, None) for name in ("ticket", "restore")]
    return tuple(ticket for ticket in found if ticket is not None)


def admitted(world: World, n_tokens: int, *, n_given: int = 0, peer: str = "") -> None:
    world.core.submit("r", prompt(n_tokens), peer=peer, n_pages_given=n_given)
    world.tick()
    lookups = world.only(StartLookup)
    found = {}
    if lookups:
        assert isinstance(lookups[-1], StartLookup)
        found = {lookups[-1].ticket: Observation(0, 1, 0)}
    world.tick(found)
    world.tick()


def test_what_goes_down_holds_each_block_until_it_is_copied() -> None:
    world = World()
    world.core.stow(prompt(12), 0, [7, 8, 9])
    assert world.held == Counter({7: 1, 8: 1, 9: 1})
    world.tick()
    (mirror,) = world.only(StartMirror)
    assert isinstance(mirror, StartMirror)
    assert world.orders is not None
    assert [world.orders.lent[page] for page in mirror.device] == [7, 8, 9]
    world.tick({mirror.ticket: Observation(3, 1, 3)})
    world.tick()
    assert world.n_held() == 0
    assert world.core.hit_from(prompt(13), 0).host == 3


def test_what_is_below_already_is_not_copied_again() -> None:
    world = World()
    world.down(3)
    n_mirrors = len(world.only(StartMirror))
    world.core.stow(prompt(16), 0, [1, 2, 3, 4])
    world.tick()
    world.tick()
    (mirror,) = world.only(StartMirror)[n_mirrors:]
    assert isinstance(mirror, StartMirror)
    assert len(mirror.device) == 1
    assert world.n_held() == 1


def test_no_copy_starts_and_no_promise_is_made_before_the_blocks_are_known() -> None:
    world = World()
    world.down(2)
    n_sent = len(world.sent)
    admitted(world, 18, peer="peer")
    plan = world.core.plan_of("r")
    assert plan is not None
    assert (plan.bounds.host, plan.n_pages) == (2, 5)
    kinds = {type(effect) for effect in world.sent[n_sent:]}
    assert SendHold in kinds
    assert not kinds & {StartRestore, SendWant}
    assert sum(s.host_pins for s in world.core.state.agreed.index.segments.values()) == 1

    world.core.place("r", [11, 12, 13, 14, 15])
    world.tick()
    (restore,), (want,) = world.only(StartRestore), world.only(SendWant)
    assert isinstance(restore, StartRestore)
    assert isinstance(want, SendWant)
    assert (want.start, want.promise, len(want.device)) == (2, 2, 3)
    assert world.n_held() == 5


def test_a_lease_that_gets_no_blocks_leaves_nothing() -> None:
    world = World()
    world.down(2)
    admitted(world, 18, peer="peer")
    world.core.abort("r")
    world.tick()
    (hold,) = world.only(SendHold)
    assert isinstance(hold, SendHold)
    world.tick({hold.ticket: Observation(0, 1, int(PeerCause.LOST))})
    world.tick()
    world.tick()
    assert world.core.is_over("r")
    assert world.only(SendAborted)
    assert not world.only(StartRestore)
    assert not world.only(SendWant)
    assert not world.core.state.agreed.tickets
    assert world.n_held() == 0


def test_a_peer_that_refuses_before_the_blocks_are_known_is_not_asked_afterwards() -> None:
    world = World()
    world.down(2)
    admitted(world, 8, peer="peer")
    (hold,) = world.only(SendHold)
    assert isinstance(hold, SendHold)
    world.tick({hold.ticket: Observation(0, 1, int(PeerCause.REFUSED))})
    world.core.place("r", [1, 2])
    world.tick()
    (restore,) = world.only(StartRestore)
    assert isinstance(restore, StartRestore)
    (ready,) = world.tick({restore.ticket: Observation(2, 1, 2)}).ready
    assert ready.needs_prefill_from is None
    assert not world.only(SendWant)
    world.core.run("r")
    world.core.finish("r", b"")
    world.tick()
    world.tick()
    assert world.n_held() == 0


def test_given_pages_are_neither_copied_nor_asked_for() -> None:
    world = World()
    world.down(4)
    admitted(world, 22, n_given=3, peer="peer")
    world.core.place("r", [1, 2, 3, 4, 5, 6])
    world.tick()
    (restore,), (want,) = world.only(StartRestore), world.only(SendWant)
    assert isinstance(restore, StartRestore)
    assert isinstance(want, SendWant)
    assert len(restore.device) == 1
    assert (want.start, len(want.device)) == (4, 2)


def test_without_a_peer_the_host_computes_the_rest() -> None:
    world = World()
    world.down(2)
    admitted(world, 18)
    plan = world.core.plan_of("r")
    assert plan is not None
    assert plan.bounds.storage == 2
    assert not world.only(SendHold)
    world.core.place("r", [1, 2])
    world.tick()
    (restore,) = world.only(StartRestore)
    assert isinstance(restore, StartRestore)
    (ready,) = world.tick({restore.ticket: Observation(2, 1, 2)}).ready
    assert ready.needs_prefill_from == 8
    world.core.run("r")
    world.core.finish("r", b"")
    world.tick()
    world.tick()
    assert world.n_held() == 0
    assert not world.only(SendCommitted)


def test_a_restore_that_comes_short_is_computed_from_there() -> None:
    world = World()
    world.down(3)
    admitted(world, 18)
    world.core.place("r", [1, 2, 3])
    world.tick()
    (restore,) = world.only(StartRestore)
    assert isinstance(restore, StartRestore)
    (ready,) = world.tick({restore.ticket: Observation(1, 1, 1)}).ready
    assert ready.needs_prefill_from == 4


def test_a_peer_that_dies_tells_how_far_it_had_come() -> None:
    world = World()
    world.down(1)
    admitted(world, 18, peer="peer")
    world.core.place("r", [1, 2, 3, 4, 5])
    world.tick()
    (restore,), (hold,) = world.only(StartRestore), world.only(SendHold)
    assert isinstance(restore, StartRestore)
    assert isinstance(hold, SendHold)
    world.tick({restore.ticket: Observation(1, 1, 1), hold.ticket: Observation(2, 0, 0)})
    (ended,) = world.tick({hold.ticket: Observation(2, 0, int(PeerCause.LOST))}).ended
    assert ended.n_pages_landed == 3
    assert not world.core.is_over("r"), "the peer may still write"
    world.tick({hold.ticket: Observation(2, 1, int(PeerCause.LOST))})
    world.tick()
    assert world.core.is_over("r")
    assert world.n_held() == 0


def test_storage_is_read_ahead_only_into_blocks_that_are_known() -> None:
    world = World()
    world.down(3)
    from kvlift.core.tier import Tier

    world.core.flush((Tier.HOST,))
    world.tick()
    world.core.submit("r", prompt(18), peer="")
    world.tick()
    lookup = world.only(StartLookup)[-1]
    assert isinstance(lookup, StartLookup)
    world.tick({lookup.ticket: Observation(3, 1, 3)})
    plan = world.core.plan_of("r")
    assert plan is not None
    assert (plan.bounds.host, plan.bounds.storage) == (0, 3)
    assert not world.only(StartPrefetch)
    world.core.abort("r")
    for _ in range(4):
        world.tick()
    assert not world.only(StartPrefetch)
    assert world.core.is_over("r")
    assert world.core.state.agreed.ledger.host_live == 0


def test_two_requests_with_one_prefix_never_share_a_block() -> None:
    world = World()
    for name in ("a", "b"):
        world.core.submit(name, prompt(18), peer="peer")
    world.tick()
    answers = {
        e.ticket: Observation(0, 1, 0)
        for e in world.only(StartLookup)
        if isinstance(e, StartLookup)
    }
    world.tick(answers)
    world.core.place("a", [1, 2, 3, 4, 5])
    world.core.place("b", [6, 7, 8, 9, 10])
    world.tick()
    wants = [want for want in world.only(SendWant) if isinstance(want, SendWant)]
    assert [len(want.device) for want in wants] == [5, 5]


def test_blocks_for_an_unknown_request_are_refused() -> None:
    with pytest.raises(UnknownRequest):
        World().core.place("nobody", [1])


def test_a_host_that_lends_has_no_device_tier() -> None:
    with pytest.raises(ConfigError, match="device_tier=off"):
        World(device_tier="on", device_pages=64)


def test_pages_are_given_only_where_the_host_owns_them() -> None:
    with pytest.raises(ValueError, match="full pages given"):
        World().core.submit("r", prompt(6), peer="", n_pages_given=2)
