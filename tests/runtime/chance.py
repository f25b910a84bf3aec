"""What goes wrong around simulated ranks, by chance: nodes die or say nothing, ports are slow or
fail, time passes."""

from collections.abc import Sequence
from random import Random

from attrs import define

from kvlift.core.landed import PeerCause
from kvlift.testing.clock import NS_PER_MS
from kvlift.testing.sim_memory import Mode
from kvlift.testing.sim_operation import Kind, Operation
from kvlift.testing.sim_peers import PrefillNode
from kvlift.testing.sim_rank import SimRank

PAUSES_MS = (1, 400, 31_000, 61_000)
"""Shorter and longer than every deadline of a default config."""

MODES = (Mode.AUTO, Mode.HELD)


@define(eq=False)
class Chance:
    """The world around `ranks`, whose prefill nodes are `nodes`."""

    source: Random
    nodes: Sequence[PrefillNode]
    ranks: Sequence[SimRank]

    def change(self) -> None:
        """Other weather from now on."""
        node = self.source.choice(self.nodes)
        node.mode = self.source.choice(MODES)
        node.is_silent = self.source.random() < 0.2
        if self.source.random() < 0.3:
            node.is_alive = not node.is_alive
            if node.is_alive:
                node.revive()
            else:
                for rank in self.ranks:
                    rank.peers.lose_node(node)
        for rank in self.ranks:
            rank.store.reads, rank.store.writes = (self.source.choice(MODES) for _ in range(2))
            rank.copies.restores, rank.copies.mirrors = (
                self.source.choice(MODES) for _ in range(2)
            )
            rank.clock.advance(self.source.choice(PAUSES_MS) * NS_PER_MS)
            for _node, talk in rank.peers.open_talks():
                if self.source.random() < 0.2:
                    rank.peers.fail(talk, PeerCause.REFUSED, "no")

    def land(self) -> None:
        """Some of what is under way ends, well or badly, or goes on a little."""
        for rank in self.ranks:
            for operation in [*rank.copies.log, *rank.store.log]:
                if operation.is_outstanding:
                    self._land(rank, operation)
            for node, talk in rank.peers.open_talks():
                is_said = self.source.random() < 0.4
                if is_said and node is not None and node.is_alive and not node.is_silent:
                    rank.peers.send_rest(node, talk, 1)
                    rank.peers.acknowledge(talk)

    def _land(self, rank: SimRank, operation: Operation) -> None:
        port = rank.copies if operation.kind in (Kind.RESTORE, Kind.MIRROR) else rank.store
        choice = self.source.random()
        if choice < 0.3:
            port.land(operation)
        elif choice < 0.4:
            port.fail(operation)
        elif choice < 0.6 and operation.kind is Kind.READ:
            rank.store.progress(operation, self.source.randrange(1 + len(operation.values)))

    def calm(self) -> None:
        """From now on everything ends well and by itself."""
        for node in self.nodes:
            node.revive()
            node.mode = Mode.AUTO
        for rank in self.ranks:
            rank.store.reads = rank.store.writes = Mode.AUTO
            rank.copies.restores = rank.copies.mirrors = Mode.AUTO

    def pass_s(self, n_seconds: int) -> None:
        for rank in self.ranks:
            rank.clock.advance(n_seconds * 1000 * NS_PER_MS)
