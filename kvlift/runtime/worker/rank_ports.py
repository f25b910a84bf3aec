"""The real ports of one decode rank, and counters around two of them for the statistics."""

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from attrs import define

from kvlift.core.ballot import ballot_length
from kvlift.effects.clock import MonotonicClock
from kvlift.effects.copies_cpu import CpuCopies
from kvlift.effects.device_memory import LayeredMemory
from kvlift.effects.host_pool import HostPool
from kvlift.effects.lone_rank import LoneRank
from kvlift.effects.patience import Patience
from kvlift.effects.peers import ZmqPeers
from kvlift.effects.ports import Copies, Ranks
from kvlift.effects.ranks_gloo import GlooRanks, has_ended_within, join_store
from kvlift.effects.stores.files import FileStore
from kvlift.effects.wire_security import SharedSecret
from kvlift.runtime.config import Config, ConfigError
from kvlift.runtime.interpret import Ports
from kvlift.runtime.worker.layouts import rank_layout, whole_layout
from kvlift.runtime.worker.model import AllReduce, alone
from kvlift.runtime.worker.model_config import ModelConfig
from kvlift.runtime.worker.settings import ProcessOrders, WorkerSettings

WORKER_SIZES: Final = ("page_tokens", "device_pages", "host_pages")


@define(eq=False)
class CountedRanks:
    """Implements `ports.Ranks` by another one and counts the reductions."""

    inner: Ranks
    n_sent: int = 0

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def n_ranks(self) -> int:
        return self.inner.n_ranks

    def send(self, ballot: Sequence[int]) -> None:
        self.n_sent += 1
        self.inner.send(ballot)

    def verdict(self) -> tuple[int, ...]:
        return self.inner.verdict()

    def exchange(self, report: bytes) -> list[bytes]:
        return self.inner.exchange(report)

    def close(self) -> None:
        self.inner.close()


@define(eq=False)
class CountedMemory:
    """Implements `ports.DeviceMemory` by another one and counts what the wire writes."""

    inner: LayeredMemory
    n_bytes_written: int = 0

    @property
    def page_bytes(self) -> int:
        return self.inner.page_bytes

    @property
    def n_pages(self) -> int:
        return self.inner.n_pages

    def write_page(self, device_page: int, data: memoryview) -> None:
        self.n_bytes_written += len(data)
        self.inner.write_page(device_page, data)

    def read_page(self, device_page: int, into: memoryview) -> None:
        self.inner.read_page(device_page, into)


@define(eq=False)
class RankPorts:
    """Everything of one rank that touches the world."""

    ports: Ports
    memory: LayeredMemory
    received: CountedMemory
    ranks: CountedRanks
    pool: HostPool


def driver_config(settings: WorkerSettings) -> Config:
    """The driver's config: the worker's sizes, then `settings.driver`. Raises `ConfigError`."""
    for name in WORKER_SIZES:
        if name in settings.driver:
            raise ConfigError(
                f"{name} sizes the worker's memory as well: give it as an option of its own "
                f"(--{name.replace('_', '-')} of `kvlift serve`), not among the driver's fields"
            )
    own: dict[str, object] = {
        "page_tokens": settings.page_tokens,
        "device_pages": settings.device_pages,
        "host_pages": settings.host_pages,
        "ballot_deadline_ms": int(settings.ballot_deadline_s * 1000),
        "prefetch_min_pages": 1,
        "close_deadline_ms": 3000,
    }
    if not settings.storage_folder:
        own["persist"] = "off"
    if not settings.host_pages:
        own["write"] = "none"
    return Config.parse({**own, **settings.driver})


def open_ports(
    orders: ProcessOrders, model: ModelConfig, config: Config, on_landed: Callable[[], None]
) -> RankPorts:
    """Allocate both tiers of this rank and connect it."""
    settings = orders.settings
    layout = rank_layout(model, settings.page_tokens, settings.n_ranks)
    memory = LayeredMemory.allocate(layout, settings.device_pages, settings.device)
    pool = _pool(max(1, settings.host_pages), layout.page_bytes)
    received = CountedMemory(memory)
    ranks = CountedRanks(_ranks(orders, config))
    store = None
    if settings.storage_folder:
        store = FileStore(
            settings.storage_folder,
            pool,
            memory,
            n_threads=2,
            size_bytes_max=settings.storage_bytes_max,
            on_landed=on_landed,
        )
    secret = SharedSecret(orders.secret.encode()) if orders.secret else None
    peers = ZmqPeers(
        received,
        whole_layout(model, settings.page_tokens).fingerprint(),
        orders.rank,
        settings.n_ranks,
        model=f"{model.name}/{orders.weights_name}",
        group=f"{orders.run_folder}/decode",
        secret=secret,
        lease_s=settings.lease_s,
        peer_dead_s=settings.peer_dead_s,
        heartbeat_s=min(1.0, settings.peer_dead_s / 4),
        requests_per_peer_max=settings.n_requests_held_max,
        on_landed=on_landed,
    )
    ports = Ports(
        copies=_copies(pool, memory, on_landed),
        peers=peers,
        ranks=ranks,
        clock=MonotonicClock(),
        store=store,
    )
    return RankPorts(ports, memory, received, ranks, pool)


def _pool(n_pages: int, page_bytes: int) -> HostPool:
    """Raises `MemoryError` with a sentence where the memory is not to be had."""
    try:
        return HostPool(n_pages, page_bytes)
    except (OSError, RuntimeError) as error:
        raise MemoryError(
            f"no memory for {n_pages} host pages of {page_bytes} bytes "
            f"({error}): lower --host-pages (host_pages)"
        ) from None


def _copies(pool: HostPool, memory: LayeredMemory, on_landed: Callable[[], None]) -> Copies:
    if memory.device.type == "cuda":
        from kvlift.effects.copies_cuda import CudaCopies

        return CudaCopies(pool, memory, on_landed=on_landed)
    return CpuCopies(pool, memory, on_landed=on_landed)


def _ranks(orders: ProcessOrders, config: Config) -> Ranks:
    length = ballot_length(config.policy())
    if orders.settings.n_ranks == 1:
        return LoneRank(length)
    return GlooRanks(
        orders.rank,
        orders.settings.n_ranks,
        join_store("127.0.0.1", orders.store_port),
        deadline_s=orders.settings.ballot_deadline_s,
        ballot_length=length,
        group=orders.group,
        join_timeout_s=orders.settings.start_timeout_s,
    )


def model_all_reduce(orders: ProcessOrders) -> AllReduce:
    """The sum over ranks by torch.distributed's default group (gloo; it takes CUDA tensors too)."""
    settings = orders.settings
    if settings.n_ranks == 1:
        return alone
    store = dist.PrefixStore(f"model/{orders.group}", join_store("127.0.0.1", orders.store_port))
    dist.init_process_group(
        "gloo",
        store=store,
        rank=orders.rank,
        world_size=settings.n_ranks,
        timeout=timedelta(seconds=settings.start_timeout_s),
    )
    return functools.partial(sum_over_ranks, settings.ballot_deadline_s)


def sum_over_ranks(deadline_s: float, tensor: torch.Tensor) -> torch.Tensor:
    """In place, over the default group. Raises RuntimeError where a rank does not come in time."""
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None, "an asynchronous collective returns its work"
    patience = Patience(deadline_s)
    while patience.left_s():
        with patience.turn() as turn_s:
            if has_ended_within(work, turn_s):
                return tensor
    raise RuntimeError(f"a rank has not come to a sum within {deadline_s:g} s")
