"""One worker of vLLM: its device pages, its host tier, its store, its wire; it obeys.

The pages are vLLM's blocks. All that runs here runs beside the model: copies and reads on threads
of their own, pages of the prefill instance on the wire's.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Final

import torch
from attrs import define, field, frozen

from kvlift.core.policy import Switch
from kvlift.effects.clock import MonotonicClock
from kvlift.effects.copies_cpu import CpuCopies
from kvlift.effects.device_memory import LayeredMemory
from kvlift.effects.host_pool import HostPool
from kvlift.effects.keyring import KeyRing
from kvlift.effects.lone_rank import LoneRank
from kvlift.effects.peers import ZmqPeers
from kvlift.effects.ports import Copies, Store
from kvlift.effects.stores.files import FileStore
from kvlift.effects.wakeup import Wakeup
from kvlift.runtime.hosted import Orders, Worker
from kvlift.runtime.hosts.vllm_layout import BlockLayout, registered
from kvlift.runtime.hosts.vllm_metadata import StepOrders, StepReport
from kvlift.runtime.hosts.vllm_peers import PeersOfRank
from kvlift.runtime.hosts.vllm_prefill import KeptPrompts
from kvlift.runtime.hosts.vllm_settings import VllmSettings
from kvlift.runtime.hosts.vllm_stats import CountedCopies, CountedMemory, CountedStore, Tally
from kvlift.runtime.interpret import Ports

_log = logging.getLogger(__name__)

STORE_THREADS: Final = 2


@frozen(kw_only=True)
class Place:
    """Which worker this is. `model`: what keys and peers compare. `group`: names this instance."""

    rank: int
    n_ranks: int
    model: str
    group: str
    page_tokens: int

    @property
    def shard(self) -> str:
        return f"tp{self.rank}of{self.n_ranks}"


@define(eq=False)
class WorkerSide:
    """The worker's half of the connector. Nothing here waits."""

    settings: VllmSettings
    place: Place
    tally: Tally = field(factory=Tally, init=False)
    _worker: Worker | None = field(default=None, init=False)
    _pool: HostPool | None = field(default=None, init=False)
    _received: CountedMemory | None = field(default=None, init=False)
    _kept: KeptPrompts | None = field(default=None, init=False)
    _address: str = field(default="", init=False)
    _orders: Orders | None = field(default=None, init=False)
    _loaded: set[str] = field(factory=set, init=False)
    _failed_blocks: set[int] = field(factory=set, init=False)
    _n_bytes_told: list[int] = field(factory=lambda: [0, 0], init=False)

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """The engine's tensors are there. Raises `LayoutRefusedError`, `ConfigError`, `OSError`."""
        layout, memory = registered(kv_caches, self.place.page_tokens)
        config = self.settings.config(self.place.page_tokens, memory.page_bytes)
        self._pool = HostPool(max(1, config.host_pages), memory.page_bytes)
        self._received = CountedMemory(memory)
        self._worker = Worker(config, self._ports(layout, memory, self._pool))
        if self.settings.bind:
            self._listen(layout, memory)
        _log.info(
            "%s: blocks of %d tokens, %d bytes; %d host pages; storage %s",
            self.place.shard,
            self.place.page_tokens,
            memory.page_bytes,
            config.host_pages,
            self.settings.storage or "off",
        )

    def _ports(self, layout: BlockLayout, memory: LayeredMemory, pool: HostPool) -> Ports:
        wakeup, settings, place = Wakeup(), self.settings, self.place
        assert self._received is not None
        secret = settings.secret()
        peers = ZmqPeers(
            self._received,
            layout.fingerprint(place.model, place.shard),
            model=place.model,
            group=f"{place.group}/{place.rank}",
            secret=secret,
            lease_s=settings.lease_s,
            peer_dead_s=settings.peer_dead_s,
            heartbeat_s=min(1.0, settings.peer_dead_s / 4),
            tells_dropped=Switch.ON,
            on_landed=wakeup.ring,
        )
        return Ports(
            copies=CountedCopies(_copies(pool, memory, wakeup.ring), self.tally),
            peers=PeersOfRank(peers, place.rank, has_secret=secret is not None),
            ranks=LoneRank(1),
            clock=MonotonicClock(),
            store=self._store(layout, memory, pool, wakeup.ring),
            wakeup=wakeup,
        )

    def _store(
        self,
        layout: BlockLayout,
        memory: LayeredMemory,
        pool: HostPool,
        on_landed: Callable[[], None],
    ) -> Store | None:
        settings = self.settings
        if not settings.storage:
            return None
        store = FileStore(
            settings.storage,
            pool,
            memory,
            n_threads=STORE_THREADS,
            size_bytes_max=settings.storage_bytes_max or None,
            keyring=KeyRing(shard=f"{self.place.shard} {layout.words()}"),
            on_landed=on_landed,
        )
        return CountedStore(store, self.tally)

    def _listen(self, layout: BlockLayout, memory: LayeredMemory) -> None:
        place = self.place
        self._kept = KeptPrompts(memory, self.settings.kept_s)
        self._address = self._kept.open(
            bind_of(self.settings.bind, place.rank),
            layout.fingerprint(place.model, place.shard),
            place.model,
            lease_s=self.settings.lease_s,
            secret=self.settings.secret(),
        )

    @property
    def address(self) -> str:
        """Where decode instances reach this worker; empty where it does not listen."""
        return self._address

    # -- the step --------------------------------------------------------------------------------

    def obey(self, step: StepOrders) -> None:
        """Start what is ordered."""
        worker = self._started()
        if step.orders is not None:
            self._orders = step.orders
            worker.obey(step.orders)
        self._loaded.update(step.loaded)
        self._failed_blocks.update(step.failed_blocks)

    def keep(self, step: StepOrders) -> None:
        """Before the forward of this step: what is kept was computed in an earlier one."""
        for keep in step.keeps:
            if self._kept is not None:
                self._kept.keep(keep)

    def taken_results(self) -> tuple[set[str], set[str]]:
        """Requests whose blocks nobody reads any more here, and those whose load has ended."""
        loaded, self._loaded = self._loaded, set()
        sent = set() if self._kept is None else self._kept.taken_released()
        return sent, loaded

    def taken_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def report(self, step: StepOrders) -> StepReport | None:
        """As late in the step as can be: what has landed until now is in it."""
        if not step.wants_ballot or self._orders is None:
            return None
        return StepReport((self._started().look(self._orders),))

    def taken_stats(self) -> dict[str, int]:
        """What is new since the last call, for the metrics."""
        received = 0 if self._received is None else self._received.n_bytes_written
        sent = 0 if self._kept is None else self._kept.n_bytes_sent
        self.tally.add("bytes_received", received - self._n_bytes_told[0])
        self.tally.add("bytes_sent", sent - self._n_bytes_told[1])
        self._n_bytes_told = [received, sent]
        if self._kept is not None:
            self.tally.set("leases", self._kept.n_kept)
        return self.tally.taken()

    def close(self) -> bool:
        """Wait for what runs, up to a deadline. False: something still does."""
        is_quiet = True
        if self._kept is not None:
            is_quiet = self._kept.close()
        if self._worker is not None:
            worker, self._worker = self._worker, None
            is_quiet = worker.close() and is_quiet
        if self._pool is not None and is_quiet:
            self._pool.close()
        return is_quiet

    def _started(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("vLLM has not registered its KV caches, or has shut down")
        return self._worker


def bind_of(bind: str, rank: int) -> str:
    """Rank 0's address, or `rank` ports further on."""
    host, colon, port = bind.rpartition(":")
    return f"{host}{colon}{int(port) + rank}" if port.isdigit() else bind


def _copies(pool: HostPool, memory: LayeredMemory, on_landed: Callable[[], None]) -> Copies:
    if memory.device.type == "cuda":
        from kvlift.effects.copies_cuda import CudaCopies

        return CudaCopies(pool, memory, on_landed=on_landed)
    return CpuCopies(pool, memory, on_landed=on_landed)
