"""Starts a cluster of worker processes, talks to it, and leaves nothing behind.

    with Cluster(WorkerSettings(n_ranks=2)) as cluster:
        [answer] = cluster.generate([Request(rid="a", tokens=(1, 2, 3), sampling=Sampling())])

The ranks' rendezvous store lives here, not in a rank, so that rank 0 is missed like any other.
"""

import asyncio
import concurrent.futures
import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import torch.distributed as dist
import zmq.asyncio
from attrs import define, field

from kvlift.effects.ranks_gloo import open_store
from kvlift.runtime.config import ConfigError
from kvlift.runtime.worker.children import Child, Voices, end_all
from kvlift.runtime.worker.front import Line, RemoteEngine
from kvlift.runtime.worker.gathering import Generation, gathered
from kvlift.runtime.worker.generation import EngineDownError, Request
from kvlift.runtime.worker.layouts import whole_layout
from kvlift.runtime.worker.loading import ModelSource
from kvlift.runtime.worker.messages import (
    DamageRequested,
    FlushRequested,
    StorageSwitched,
    Verifying,
)
from kvlift.runtime.worker.preconditions import device_fault, memory_bytes, memory_fault
from kvlift.runtime.worker.rank_ports import driver_config
from kvlift.runtime.worker.run_folder import RunFolder
from kvlift.runtime.worker.settings import ProcessOrders, WorkerSettings

Result = TypeVar("Result")

END_S: Final = 5.0
OWN_WORDS_S: Final = 0.5
"""How long a rank that ended because of another waits for that one's words."""

REQUESTS_KEPT: Final = 100_000
PREFILL_MODULE: Final = "kvlift.runtime.worker.prefill_process"
RANK_MODULE: Final = "kvlift.runtime.worker.rank"


class ClusterRefusedError(ValueError):
    """These settings cannot work; the message says what to change."""


@define(eq=False)
class Cluster:
    """Prefill process and decode ranks of one machine. All methods are safe on any thread.

    `secret`: shared with prefill nodes elsewhere; without one, a cluster of its own makes one up.
    Raises `ClusterRefusedError`, `ModelRefusedError`, and `EngineDownError` if a child does not
    come up.
    """

    settings: WorkerSettings
    secret: str = field(default="", repr=False)
    engine: RemoteEngine = field(init=False)
    fault: str = field(default="", init=False)
    died: threading.Event = field(factory=threading.Event, init=False)
    prefill_died: threading.Event = field(factory=threading.Event, init=False)
    ranks: list[Child] = field(factory=list, init=False)
    prefill: Child | None = field(default=None, init=False)
    _loop: asyncio.AbstractEventLoop = field(init=False)
    _thread: threading.Thread = field(init=False)
    _context: "zmq.asyncio.Context" = field(init=False)
    _folder: RunFolder = field(init=False)
    _voices: Voices = field(factory=Voices, init=False)
    _store: dist.TCPStore | None = field(default=None, init=False)
    _n_starts: int = field(default=0, init=False)
    _weights_name: str = field(default="", init=False)
    _page_bytes: int = field(default=0, init=False)
    _done: deque[Generation] = field(factory=lambda: deque(maxlen=REQUESTS_KEPT), init=False)

    def __enter__(self) -> Self:
        fault = self.settings.faults() or device_fault(self.settings)
        if fault is not None:
            raise ClusterRefusedError(fault)
        source = ModelSource(self.settings.model, self.settings.seed)
        config = source.config()
        if self.settings.role != "prefill":
            config.fits_ranks(self.settings.n_ranks)
            try:
                driver_config(self.settings)
            except ConfigError as error:
                raise ClusterRefusedError(str(error)) from error
        self._weights_name = source.weights_name()
        self._page_bytes = whole_layout(config, self.settings.page_tokens).page_bytes
        fault = memory_fault(self.settings, self._page_bytes, memory_bytes())
        if fault is not None:
            raise ClusterRefusedError(fault)
        if not self.secret and self.settings.role == "both":
            self.secret = secrets.token_hex(32)
        self._folder = RunFolder.made()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cluster", daemon=True)
        self._thread.start()
        self._context = zmq.asyncio.Context()
        self.engine = RemoteEngine(
            self.settings.n_requests_max,
            {
                "model": config.name,
                "role": self.settings.role,
                "n_ranks": self.settings.n_ranks,
                "page_tokens": self.settings.page_tokens,
                "device_pages": self.settings.device_pages,
                "host_pages": self.settings.host_pages,
            },
        )
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End and reap every child, remove the folder; may be called again."""
        children = [*self.ranks, *([self.prefill] if self.prefill else [])]
        end_all(children, END_S)
        self.ranks, self.prefill, self._store = [], None, None
        if self._thread.is_alive():
            self.run(self._close_lines())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(END_S)
            self._loop.close()
            self._context.destroy(linger=0)
        self._folder.remove()

    async def _close_lines(self) -> None:
        self.engine.end_all("the worker is being closed")
        lines = [*self.engine.ranks, *([self.engine.prefill] if self.engine.prefill else [])]
        self.engine.ranks, self.engine.prefill = [], None
        for line in lines:
            await line.close()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the cluster's loop and wait for it."""
        return self.start(work).result()

    def start(self, work: Coroutine[Any, Any, Result]) -> "concurrent.futures.Future[Result]":
        """The same without waiting."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # -- requests ----------------------------------------------------------------------------------

    def submit(self, request: Request) -> "concurrent.futures.Future[Generation]":
        """Start a request; the future raises what `Engine.submit` raises."""
        return self.start(self._generated(request))

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Run requests side by side; answers in their order, failed ones included (`finish`)."""
        futures = [self.submit(request) for request in requests]
        return [future.result() for future in futures]

    async def _generated(self, request: Request) -> Generation:
        generation = await gathered(request, self.engine.submit(request), self._page_bytes)
        self._done.append(generation)
        return generation

    def score(self, tokens: Sequence[int], start: int) -> tuple[float, ...]:
        """See `Engine.score`."""
        return self.run(self.engine.score(tokens, start))

    # -- commands ----------------------------------------------------------------------------------

    def flush(self, tiers: Sequence[str]) -> None:
        """Forget tiers of the decode worker: any of device, host, storage. Returns afterwards."""
        self.run(self.engine.flush(tiers))

    def flush_prefill(self) -> None:
        """Forget the prefill process's own prefix cache."""

        async def tell() -> None:
            if self.engine.prefill is not None:
                self.engine.prefill.tell(FlushRequested(tiers=()))
            await self.engine.prefill_stats()

        self.run(tell())

    def switch_storage(self, *, is_attached: bool) -> None:
        """Take storage away from the running worker, or give it back."""
        self._tell(StorageSwitched(is_attached=is_attached))

    def verify_restored(self, *, is_on: bool) -> None:
        """Compare restored pages with recomputed ones from now on; `stats()` counts them."""
        self._tell(Verifying(is_on=is_on))

    def damage_next_restored(self) -> None:
        """Overwrite one restored page of the next request that has one."""
        self._tell(DamageRequested())

    def _tell(self, command: StorageSwitched | Verifying | DamageRequested) -> None:
        async def tell() -> None:
            self.engine.command(command)
            await self.engine.rank_stats()

        self.run(tell())

    def stats(self) -> dict[str, Any]:
        """`requests`: every finished `Generation` of `submit` and `generate`, oldest first;
        `ranks`: one mapping a rank, see `RankLoop.stats`; `prefill`: one of the prefill process."""

        async def ask() -> dict[str, Any]:
            ranks = await self.engine.rank_stats() if self.engine.ranks else []
            return {
                "requests": list(self._done),
                "ranks": ranks,
                "prefill": await self.engine.prefill_stats(),
            }

        return self.run(ask())

    # -- processes ---------------------------------------------------------------------------------

    def restart_decode(self) -> None:
        """End the decode ranks, however they are, and start new ones: storage stays."""
        end_all(self.ranks, END_S)
        self.ranks = []
        self.run(self._drop_ranks("the decode worker is being restarted"))
        self._start_ranks()
        self._await(self.engine.ranks)

    def restart_prefill(self) -> None:
        """The same for the prefill process: a new incarnation behind the old address."""
        if self.prefill is not None:
            end_all([self.prefill], END_S)
            self.prefill = None
        self._start_prefill()
        self._await([self.engine.prefill] if self.engine.prefill else [])

    def _start_all(self) -> None:
        if self.settings.role != "decode":
            self._start_prefill()
        if self.settings.role != "prefill":
            self._start_ranks()
        self._await([*self.engine.ranks, *([self.engine.prefill] if self.engine.prefill else [])])

    def _start_prefill(self) -> None:
        old = self.engine.prefill
        line = self.run(self._line("prefill"))
        self.engine.prefill = line
        self.prefill_died.clear()
        if old is not None:
            self.run(old.close())
        self.prefill = self._child(PREFILL_MODULE, line, self._orders(0, line, ""))

    def _start_ranks(self) -> None:
        self._store = self._store or open_store()
        self._n_starts += 1
        group = f"worker-{self._n_starts}"
        lines = [self.run(self._line(f"rank {rank}")) for rank in range(self.settings.n_ranks)]
        self.engine.ranks = lines
        self.fault = ""
        self.died.clear()
        self.ranks = [
            self._child(RANK_MODULE, line, self._orders(rank, line, group))
            for rank, line in enumerate(lines)
        ]

    def _child(self, module: str, line: Line, orders: ProcessOrders) -> Child:
        return Child(line.name, module, orders, self._on_death, self._voices)

    def _orders(self, rank: int, line: Line, group: str) -> ProcessOrders:
        own = self.settings.prefill_bind or f"ipc://{self._folder.path / 'prefill.wire'}"
        reachable = own.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace(
            "tcp://*:", "tcp://127.0.0.1:"
        )
        return ProcessOrders(
            settings=self.settings,
            rank=rank,
            run_folder=str(self._folder.path),
            channel=line.address,
            store_port=self._store.port if self._store is not None else 0,
            group=group,
            weights_name=self._weights_name,
            peers=self.settings.peers or (reachable,),
            secret=self.secret,
        )

    async def _line(self, name: str) -> Line:
        socket = f"{name.replace(' ', '-')}-{secrets.token_hex(4)}"
        address = f"ipc://{self._folder.path / socket}"
        is_head = name == "rank 0"
        heed = self.engine.take_outputs if is_head else (lambda _outputs: None)
        return Line.opened(self._context, name, address, heed)

    def _await(self, lines: Sequence[Line]) -> None:
        async def all_started() -> None:
            waits = asyncio.gather(*(line.started for line in lines))
            try:
                await asyncio.wait_for(waits, self.settings.start_timeout_s)
            except TimeoutError:
                late = [line.name for line in lines if not line.started.done()]
                raise EngineDownError(
                    f"{', '.join(late)} did not start within {self.settings.start_timeout_s:g} s"
                ) from None

        self.run(all_started())

    async def _drop_ranks(self, reason: str) -> None:
        lines, self.engine.ranks = self.engine.ranks, []
        self.engine.end_all(reason)
        for line in lines:
            await line.close()

    def _on_death(self, child: Child, reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: so has the cluster
            self._loop.call_soon_threadsafe(self._note_death, child, reason)

    def _note_death(self, child: Child, reason: str) -> None:
        if child is self.prefill:
            if self.engine.prefill is not None:
                self.engine.prefill.fail(reason)
            self.prefill_died.set()
            if self.settings.role == "prefill":
                self.fault = f"the prefill node is down: {reason}"
                self.died.set()
            return
        if child.followed_another:
            # The rank that it has followed is about to end, too, and knows why.
            self._loop.call_later(OWN_WORDS_S, self._note_fall, child, reason)
        else:
            self._note_fall(child, reason)

    def _note_fall(self, child: Child, reason: str) -> None:
        if child not in self.ranks or self.fault:
            return
        self.fault = f"the decode worker is down: {reason}"
        for line in self.engine.ranks:
            line.fail(self.fault)
        self.engine.end_all(self.fault)
        self.died.set()
        # One rank less is no group: the others notice by themselves or are ended with the cluster.
