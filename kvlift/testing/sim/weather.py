"""Faults that come with time rather than with an operation, and how all of them heal."""

from collections.abc import Sequence
from random import Random
from typing import Final

from attrs import define, field

from kvlift.core.landed import PeerCause
from kvlift.core.tier import Tier
from kvlift.testing.sim.plan import NS_PER_MS
from kvlift.testing.sim.world import World
from kvlift.testing.sim_peers import Conversation, PrefillNode
from kvlift.testing.sim_store import Damage

SPANS_MS: Final = (5, 50, 500, 5000)
TIERS: Final = ((Tier.DEVICE,), (Tier.HOST,), (Tier.DEVICE, Tier.HOST, Tier.STORAGE))


@define(eq=False)
class Weather:
    """Strikes between ticks. `paused_ns`: how long all ranks stand still after this tick."""

    world: World
    is_detached: bool = False
    paused_ns: int = 0
    _asides: int = 0
    _limits: dict[int, int | None] = field(factory=dict)

    def strike(self) -> None:
        faults = self.world.faults
        self.paused_ns = 0
        for kind, strike in (
            ("store_damaged", self._damage),
            ("store_lost", self._lose_page),
            ("store_full", self._fill),
            ("store_silent", self._silence_store),
            ("peer_rejects", self._reject),
            ("peer_fails", self._fail_peer),
            ("peer_expires", self._expire),
            ("peer_dies", self._kill),
            ("peer_silent", self._silence_peer),
            ("flush", self._flush),
            ("detach", self._detach),
            ("set_aside", self._set_aside),
            ("late_answer", self._answer_again),
            ("pause", self._pause),
        ):
            if faults.strikes(kind) and not strike(faults.stream(kind)):
                faults.take_back(kind)

    def heal(self) -> None:
        """From now on nothing fails; what stays silent is what the plan says."""
        world = self.world
        world.faults.is_healed = True
        for number in list(self._limits):
            self._empty(number)
        world.give_all_back()
        self._attach()
        for landings in world.landings:
            landings.speak()
        silent = [node for node in world.nodes.values() if node.is_silent]
        for node in silent[1 if world.plan.stays_silent and len(world.nodes) > 1 else 0 :]:
            world.speak(node)
        for node in world.nodes.values():
            world.revive(node)

    # Storage.

    def _damage(self, draw: Random) -> bool:
        store = draw.choice(self.world.ranks).store
        for value in draw.sample(list(store.pages), min(2, len(store.pages))):
            store.damage(value, draw.choice((Damage.CORRUPT, Damage.TRUNCATED)))
        return bool(store.pages)

    def _lose_page(self, draw: Random) -> bool:
        store = draw.choice(self.world.ranks).store
        lost = draw.sample(list(store.pages), min(2, len(store.pages)))
        for value in lost:
            store.lose(value)
        return bool(lost)

    def _fill(self, draw: Random) -> bool:
        number = draw.randrange(len(self.world.ranks))
        if number in self._limits:
            return False
        store = self.world.ranks[number].store
        self._limits[number] = store.n_pages_max
        store.n_pages_max = len(store.pages)
        self._after(draw, lambda: self._empty(number))
        return True

    def _empty(self, number: int) -> None:
        if number in self._limits:
            self.world.ranks[number].store.n_pages_max = self._limits.pop(number)

    def _silence_store(self, draw: Random) -> bool:
        landings = draw.choice(self.world.landings)
        if landings.is_silent:
            return False
        landings.is_silent = True
        self._after(draw, landings.speak)
        return True

    def _detach(self, draw: Random) -> bool:
        if self.is_detached:
            return False
        self.is_detached = True
        for driver in self.world.drivers:
            driver.detach_storage()
        self._after(draw, self._attach)
        return True

    def _attach(self) -> None:
        if self.is_detached:
            self.is_detached = False
            for driver in self.world.drivers:
                driver.attach_storage()

    # Prefill nodes.

    def _talks(self) -> list[Conversation]:
        """Rank 0's conversations that nobody has ended."""
        open_talks = self.world.ranks[0].peers.open_talks()
        return [t for node, t in open_talks if node is not None and t.is_open and not t.is_aborted]

    def _all_ranks(self, talk: Conversation) -> list[Conversation]:
        return [
            other
            for rank in self.world.ranks
            for _node, other in rank.peers.open_talks()
            if other.attempt == talk.attempt
        ]

    def _excuse(self, talk: Conversation, what: str) -> None:
        self.world.excuses.request(talk.rid, self.world.agenda.now_ns, what)

    def _node_of(self, talk: Conversation) -> PrefillNode:
        for node, other in self.world.ranks[0].peers.open_talks():
            if other is talk and node is not None:
                return node
        raise LookupError(f"no node has the conversation about {talk.rid}")

    def _reject(self, draw: Random) -> bool:
        talks = self._talks()
        if talks:
            talk = draw.choice(talks)
            self._excuse(talk, "its prefill node rejected it")
            self._node_of(talk).refuse(talk.rid, "busy", self._all_ranks(talk))
        return bool(talks)

    def _expire(self, draw: Random) -> bool:
        talks = self._talks()
        if talks:
            talk = draw.choice(talks)
            self._excuse(talk, "its lease ended")
            self._node_of(talk).expire(talk.rid, self._all_ranks(talk))
        return bool(talks)

    def _fail_peer(self, draw: Random) -> bool:
        rank = draw.choice(self.world.ranks)
        talks = [
            talk
            for node, talk in rank.peers.open_talks()
            if node is not None and node.is_alive and talk.is_open and not talk.is_aborted
        ]
        if talks:
            talk = draw.choice(talks)
            self._excuse(talk, "its prefill node failed")
            rank.peers.fail(talk, PeerCause.GONE, f"prefill lost the pages of {talk.rid}")
        return bool(talks)

    def _kill(self, draw: Random) -> bool:
        node = draw.choice(list(self.world.nodes.values()))
        if not node.is_alive:
            return False
        losses_ns = [draw.randint(0, self.world.plan.delays.loss_ns) for _ in self.world.ranks]
        self.world.kill(node, losses_ns)
        self._after(draw, lambda: self.world.revive(node))
        return True

    def _silence_peer(self, draw: Random) -> bool:
        node = draw.choice(list(self.world.nodes.values()))
        if node.is_silent:
            return False
        self.world.silence(node)
        config = self.world.plan.config
        deadline_ms = draw.choice((config.transfer_deadline_ms, config.quarantine_max_ms))
        span_ns = int(deadline_ms * NS_PER_MS * draw.choice((0.01, 0.2, 1.5)))
        self.world.agenda.after(span_ns, lambda: self._speak(node))
        return True

    def _speak(self, node: PrefillNode) -> None:
        if not self.world.faults.is_healed:
            self.world.speak(node)

    # The host and its machine.

    def _flush(self, draw: Random) -> bool:
        tiers: Sequence[Tier] = draw.choice(TIERS)
        for driver in self.world.drivers:
            driver.flush(tiers)
        return True

    def _set_aside(self, draw: Random) -> bool:
        number = draw.randrange(len(self.world.drivers))
        tier = draw.choice((Tier.DEVICE, Tier.HOST))
        config = self.world.plan.config
        n_all = config.device_pages if tier is Tier.DEVICE else config.host_pages
        if n_all == 0:
            return False
        self.world.set_aside(number, tier, draw.randint(1, max(1, n_all // 2)))
        self._asides += 1
        latest = self._asides

        def give_back() -> None:
            if latest == self._asides:
                self.world.give_all_back()

        self._after(draw, give_back)
        return True

    def _answer_again(self, draw: Random) -> bool:
        number = draw.randrange(len(self.world.ranks))
        landings, wires = self.world.landings[number], self.world.wires[number]
        over = landings.ended()[-64:]
        talks = [talk for talk in wires.rank.peers.log if talk.last_report is not None][-16:]
        if talks and (not over or draw.random() < 0.4):
            return wires.rank.peers.repeat(draw.choice(talks))
        if over:
            landings.repeat(draw.choice(over))
        return bool(over)

    def _pause(self, draw: Random) -> bool:
        self.paused_ns = draw.choice(SPANS_MS[1:]) * NS_PER_MS
        return True

    def _after(self, draw: Random, event: object) -> None:
        assert callable(event)
        self.world.agenda.after(int(draw.choice(SPANS_MS) * NS_PER_MS), event)
