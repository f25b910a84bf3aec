"""The prefill process: a `PrefillNode` in front of a `PrefillEngine`.

python -m kvlift.runtime.worker.prefill_process    (orders on standard input)
"""

import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Final

import zmq
from attrs import define, field

from kvlift.core.ids import Attempt, Rid
from kvlift.effects.wire_io import Waker
from kvlift.effects.wire_security import SharedSecret
from kvlift.runtime.prefill import PrefillNode
from kvlift.runtime.prefill_requests import Asked
from kvlift.runtime.worker.child import Channel, live
from kvlift.runtime.worker.layouts import whole_layout
from kvlift.runtime.worker.loading import ModelSource
from kvlift.runtime.worker.messages import (
    Answered,
    Command,
    FlushRequested,
    MetricsAsked,
    ScoreAsked,
    Started,
    StatsAsked,
    StopRequested,
)
from kvlift.runtime.worker.plain_engine import plain_scores
from kvlift.runtime.worker.prefill_engine import PrefillEngine, PrefillRun
from kvlift.runtime.worker.settings import ProcessOrders, WorkerSettings

IDLE_S: Final = 0.5


@define(eq=False)
class Link:
    """Slows what leaves this process down to `gbps` 10^9 bits a second; 0 leaves it alone."""

    gbps: float
    n_bytes: int = field(default=0, init=False)
    _free_at_s: float = field(default=0.0, init=False)

    def carry(self, n_bytes: int) -> None:
        """Wait until the link has carried these bytes after those before them."""
        self.n_bytes += n_bytes
        if not self.gbps:
            return
        now = time.monotonic()
        self._free_at_s = max(now, self._free_at_s) + n_bytes * 8 / (self.gbps * 1e9)
        time.sleep(self._free_at_s - now)


@define(eq=False)
class Pages:
    """Implements `PageSource` over the live runs. Read on the node's thread."""

    link: Link
    runs: dict[Rid, PrefillRun] = field(factory=dict)

    def page_bytes_for(self, rid: Rid, position: int, rank: int, n_ranks: int) -> bytes:
        data = self.runs[rid].page_bytes(position, rank=rank, n_ranks=n_ranks)
        self.link.carry(len(data))
        return data


@define(eq=False)
class PrefillProcess:
    """One prompt is computed at a time, first come first served, a chunk between two looks around.

    A second attempt of a request id waits until nothing reads the pages of the first.
    """

    node: PrefillNode
    engine: PrefillEngine
    pages: Pages
    channel: Channel
    info: dict[str, object]
    _queue: deque[Asked] = field(factory=deque, init=False)
    _current: Asked | None = field(default=None, init=False)
    _attempts: dict[Rid, Attempt] = field(factory=dict, init=False)
    _n_tokens_computed: int = field(default=0, init=False)
    _n_tokens_reused: int = field(default=0, init=False)

    def run(self, waker: Waker, stop: threading.Event) -> None:
        poller = zmq.Poller()
        poller.register(waker.fileno(), zmq.POLLIN)
        poller.register(self.channel.socket, zmq.POLLIN)
        while not stop.is_set():
            is_busy = self._current is not None or bool(self._startable())
            poller.poll(0 if is_busy else int(IDLE_S * 1000))
            waker.rest()
            for command in self.channel.commands(0.0):
                if isinstance(command, StopRequested):
                    return
                self._obey(command)
            for ended in self.node.ended():
                self._forget(ended.rid, ended.attempt)
            self._queue.extend(self.node.poll())
            self._compute()

    def _startable(self) -> Asked | None:
        return next((asked for asked in self._queue if asked.rid not in self._attempts), None)

    def _compute(self) -> None:
        if self._current is None:
            self._start(self._startable())
        asked = self._current
        if asked is None:
            return
        run = self.pages.runs[asked.rid]
        before = run.n_computed
        self.engine.step(run)
        self._n_tokens_computed += run.n_computed - before
        self.node.page_ready(asked.rid, asked.attempt, run.n_pages_done)
        if run.first is not None:
            token, logprob = run.first.token, run.first.logprob
            self.node.first_token(asked.rid, asked.attempt, token, logprob)
            self._current = None

    def _start(self, asked: Asked | None) -> None:
        if asked is None:
            return
        self._queue.remove(asked)
        try:
            run = self.engine.start(asked.prompt)
        except ValueError as error:
            self.node.reject(asked.rid, asked.attempt, str(error))
            return
        self._n_tokens_reused += run.n_reused
        self.pages.runs[asked.rid] = run
        self._attempts[asked.rid] = asked.attempt
        self._current = asked

    def _forget(self, rid: Rid, attempt: Attempt) -> None:
        """Nothing reads its pages any more, and nobody waits for its token."""
        if self._attempts.get(rid) == attempt:
            del self._attempts[rid], self.pages.runs[rid]
            if self._current is not None and self._current.rid == rid:
                self._current = None
        kept = [each for each in self._queue if (each.rid, each.attempt) != (rid, attempt)]
        self._queue = deque(kept)

    def _obey(self, command: Command) -> None:
        match command:
            case FlushRequested():
                self.engine.forget_all()
            case StatsAsked(number=number):
                self.channel.tell(Answered(number=number, value=self._stats()))
            case MetricsAsked(number=number):
                self.channel.tell(Answered(number=number, value=""))
            case ScoreAsked(number=number, tokens=tokens, start=start):
                scores = plain_scores(self.engine.decoder, tokens, start)
                self.channel.tell(Answered(number=number, value=scores))
            case _:
                raise ValueError(f"a prefill process cannot obey {type(command).__name__}")

    def _stats(self) -> dict[str, object]:
        return {
            **self.info,
            "requests_held": len(self._attempts),
            "requests_queued": len(self._queue),
            "tokens_computed": self._n_tokens_computed,
            "tokens_reused": self._n_tokens_reused,
            "pages_cached": self.engine.n_cached_pages,
            "bytes_sent": self.pages.link.n_bytes,
        }


def bind_address(orders: ProcessOrders) -> str:
    """Where the node listens: as told, or a private socket in the cluster's folder."""
    return orders.settings.prefill_bind or f"ipc://{Path(orders.run_folder) / 'prefill.wire'}"


def engine_of(settings: WorkerSettings) -> PrefillEngine:
    source = ModelSource(settings.model, settings.seed)
    return PrefillEngine(
        source.decoder(device=settings.device),
        settings.page_tokens,
        n_cached_pages_max=settings.prefill_cached_pages,
        chunk_tokens=settings.prefill_chunk_tokens,
        keeps_apart=settings.decode_reuses,
    )


def work(orders: ProcessOrders, stop: threading.Event) -> None:
    settings = orders.settings
    engine = engine_of(settings)
    config = engine.decoder.config
    waker = Waker()
    channel = Channel(orders.channel)
    pages = Pages(Link(settings.link_gbps))
    secret = SharedSecret(orders.secret.encode()) if orders.secret else None
    with PrefillNode(
        bind_address(orders),
        whole_layout(config, settings.page_tokens).fingerprint(),
        pages,
        model=f"{config.name}/{orders.weights_name}",
        secret=secret,
        lease_s=settings.lease_s,
        requests_max=settings.n_requests_held_max,
        on_change=waker.wake,
    ) as node:
        info: dict[str, object] = {"role": "prefill", "address": node.address}
        process = PrefillProcess(node, engine, pages, channel, info)
        channel.tell(Started(info=info))
        process.run(waker, stop)
    channel.close()
    waker.close()


if __name__ == "__main__":
    sys.exit(live(work, lambda _orders: "prefill"))
