"""Everything around one simulated decode rank: memory, ports and a clock of its own."""

from collections.abc import Iterator

from attrs import define, field

from kvlift.testing.clock import ManualClock
from kvlift.testing.sim_copies import SimCopies
from kvlift.testing.sim_memory import Access, Mode, SimMemory
from kvlift.testing.sim_peers import PrefillNode, SimPeers
from kvlift.testing.sim_ranks import SimRanks, in_process_ranks
from kvlift.testing.sim_store import SimStore


@define(eq=False)
class SimRank:
    """One rank's world; `ports` of the driver are these."""

    memory: SimMemory
    copies: SimCopies
    store: SimStore
    peers: SimPeers
    ranks: SimRanks
    clock: ManualClock = field(factory=ManualClock)

    def accesses(self) -> Iterator[Access]:
        """Everything in flight that may touch a page of this rank."""
        yield from self.copies.accesses()
        yield from self.store.accesses()
        yield from self.peers.accesses()

    def effects(self) -> list[str]:
        """Class names of the effects since `clear_effects`, port by port."""
        return [*self.store.calls.names, *self.copies.calls.names, *self.peers.calls.names]

    def clear_effects(self) -> None:
        for calls in (self.store.calls, self.copies.calls, self.peers.calls):
            calls.clear()


def sim_ranks(
    n_ranks: int,
    n_device_pages: int,
    n_host_pages: int,
    n_storage_pages: int | None,
    node: PrefillNode,
) -> list[SimRank]:
    """New ranks in one process, with empty tiers, all talking to one prefill node."""
    made = []
    for ends in in_process_ranks(n_ranks):
        memory = SimMemory(n_device_pages, n_host_pages)
        made.append(
            SimRank(
                memory,
                SimCopies(memory),
                SimStore(memory, n_storage_pages),
                SimPeers({node.name: node}, ends.rank, memory),
                ends,
            )
        )
    return made


def restarted(ranks: list[SimRank]) -> list[SimRank]:
    """The same ranks after the decode worker was started anew: storage stays, memory doesn't.

    What was in flight has died with the process; the node hears of every open request by the new
    incarnation and lets it go.
    """
    made = []
    for old, ends in zip(ranks, in_process_ranks(len(ranks)), strict=True):
        memory = SimMemory(old.memory.n_device_pages, old.memory.n_host_pages)
        copies = SimCopies(memory, old.copies.restores, old.copies.mirrors, old.copies.log)
        store = SimStore(
            memory,
            old.store.n_pages_max,
            old.store.reads,
            old.store.writes,
            is_silent=old.store.is_silent,
            n_wedged=old.store.n_wedged,
            pages=old.store.pages,
            log=old.store.log,
        )
        for node in old.peers.nodes.values():
            node.attempts.clear()
        for _node, talk in old.peers.open_talks():
            talk.is_aborted, talk.has_let_go = True, True
        peers = SimPeers(old.peers.nodes, ends.rank, memory, old.peers.log)
        for operation in (*copies.log, *store.log):
            operation.is_outstanding = False
        made.append(SimRank(memory, copies, store, peers, ends, old.clock))
    return made


def hold(rank: SimRank, node: PrefillNode, words: tuple[str, ...], mode: Mode) -> None:
    """Set the mode of the named ports (`store`, `copies`, `peer`, `writes`)."""
    if "store" in words:
        rank.store.reads = mode
    if "copies" in words:
        rank.copies.restores = mode
    if "writes" in words:
        rank.copies.mirrors = mode
        rank.store.writes = mode
    if "peer" in words:
        node.mode = mode
