"""The launcher's side of the channels: an `Engine` whose work is done in other processes.

Everything here runs on one asyncio loop.
"""

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio
from attrs import define, field

from kvlift.runtime.worker.generation import (
    EngineBusyError,
    EngineDownError,
    EngineRefusedError,
    FinishKind,
    Output,
    Request,
)
from kvlift.runtime.worker.messages import (
    AbortRequested,
    Answered,
    Command,
    Delivered,
    FlushRequested,
    MetricsAsked,
    News,
    ScoreAsked,
    Started,
    StatsAsked,
    Submitted,
)

ANSWER_S: Final = 60.0


@define(eq=False)
class Line:
    """The launcher's end of one child's channel. `address` is an `ipc://` path of its own."""

    name: str
    address: str
    on_outputs: Callable[[list[Output]], None]
    started: "asyncio.Future[dict[str, object]]" = field(init=False)
    fault: str = field(default="", init=False)
    _socket: "zmq.asyncio.Socket" = field(init=False)
    _asked: "dict[int, asyncio.Future[object]]" = field(factory=dict, init=False)
    _numbers: "itertools.count[int]" = field(factory=lambda: itertools.count(1), init=False)
    _reader: "asyncio.Task[None]" = field(init=False)

    @classmethod
    def opened(
        cls,
        context: "zmq.asyncio.Context",
        name: str,
        address: str,
        on_outputs: Callable[[list[Output]], None],
    ) -> "Line":
        """Call it on the loop."""
        line = cls(name, address, on_outputs)
        line.started = asyncio.get_running_loop().create_future()
        line._socket = context.socket(zmq.PAIR)
        line._socket.linger = 200
        line._socket.sndhwm = 0
        line._socket.bind(address)
        os.chmod(address.removeprefix("ipc://"), 0o600)
        line._reader = asyncio.create_task(line._read(), name=f"line-{name}")
        return line

    def tell(self, command: Command) -> None:
        """Raises `EngineDownError` with the reason where the child has died."""
        if self.fault:
            raise EngineDownError(self.fault)
        # libzmq queues without limit here; what may be under way is bounded by the engine.
        sent = asyncio.ensure_future(self._socket.send(msgspec.msgpack.encode(command)))
        sent.add_done_callback(_heed)

    async def ask(self, question: Callable[[int], Command], timeout_s: float = ANSWER_S) -> object:
        """The answer to a numbered question. Raises `EngineDownError`, `EngineRefusedError`."""
        number = next(self._numbers)
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self.tell(question(number))
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            raise EngineDownError(f"{self.name} did not answer within {timeout_s:g} s") from None
        finally:
            self._asked.pop(number, None)

    def expect(self, number: int) -> "asyncio.Future[object]":
        """The future of an answer to a question that another line has asked."""
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        return answer

    def expect_no_more(self, number: int) -> None:
        """Nobody waits for this answer any more."""
        self._asked.pop(number, None)

    def fail(self, reason: str) -> None:
        """The child is gone: every question ends with this reason."""
        self.fault = self.fault or reason
        for answer in self._asked.values():
            _fail(answer, self.fault)
        self._asked.clear()
        _fail(self.started, self.fault)

    async def close(self) -> None:
        self.fail("the worker is being closed")
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._socket.close()

    async def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(News)
        while True:
            news = decoder.decode(await self._socket.recv())
            match news:
                case Delivered(outputs=outputs):
                    self.on_outputs(outputs)
                case Started(info=info):
                    if not self.started.done():
                        self.started.set_result(info)
                case Answered(number=number, value=value, fault=fault):
                    answer = self._asked.pop(number, None)
                    if answer is None or answer.done():
                        continue
                    if fault:
                        answer.set_exception(EngineRefusedError(fault))
                    else:
                        answer.set_result(value)


def _heed(sent: "asyncio.Future[Any]") -> None:
    if not sent.cancelled():
        sent.exception()


def _fail(future: "asyncio.Future[Any]", reason: str) -> None:
    if not future.done():
        future.set_exception(EngineDownError(reason))
        future.exception()  # nobody may be waiting for it any more


@define(eq=False)
class RemoteEngine:
    """Implements `Engine` over the lines of decode ranks and, where there is one, of prefill.

    `_unended`: ids that rank 0 was told and has not ended. A client that leaves ends nothing by
    itself: until rank 0 says so, what it says under this id is not another request's."""

    n_requests_max: int
    info_base: dict[str, object]
    ranks: list[Line] = field(factory=list)
    prefill: Line | None = None
    _live: "dict[str, asyncio.Queue[Output | str]]" = field(factory=dict, init=False)
    _unended: set[str] = field(factory=set, init=False)
    _numbers: "itertools.count[int]" = field(factory=lambda: itertools.count(1 << 32), init=False)
    _n_ended: dict[str, int] = field(factory=dict, init=False)
    _started_s: float = field(factory=time.time, init=False)

    def _head(self) -> Line:
        if not self.ranks:
            raise EngineDownError("no decode worker is running here")
        return self.ranks[0]

    async def submit(self, request: Request) -> AsyncIterator[Output]:
        head = self._head()
        if max(len(self._live), len(self._unended)) >= self.n_requests_max:
            raise EngineBusyError(f"{self.n_requests_max} requests are under way; come back later")
        if request.rid in self._live or request.rid in self._unended:
            raise EngineRefusedError(f"the request id {request.rid[:64]} is in use; choose another")
        news: asyncio.Queue[Output | str] = asyncio.Queue()
        self._live[request.rid] = news
        is_over = False
        try:
            head.tell(Submitted(request=request))
            self._unended.add(request.rid)
            while not is_over:
                output = await news.get()
                if isinstance(output, str):
                    is_over = True
                    raise EngineDownError(output)
                is_over = output.finish is not None
                if output.finish is not None:
                    self._count(output.finish.kind)
                yield output
        finally:
            self._live.pop(request.rid, None)
            if not is_over:
                self._count(FinishKind.ABORT)
                with contextlib.suppress(EngineDownError):
                    head.tell(AbortRequested(rid=request.rid))

    def _count(self, kind: FinishKind) -> None:
        self._n_ended[kind.value] = self._n_ended.get(kind.value, 0) + 1

    def take_outputs(self, outputs: list[Output]) -> None:
        """From rank 0's line."""
        for output in outputs:
            if output.finish is not None:
                self._unended.discard(output.rid)
            news = self._live.get(output.rid)
            if news is not None:
                news.put_nowait(output)

    def end_all(self, reason: str) -> None:
        """The decode worker is gone: every live request ends with this reason."""
        self._unended.clear()
        for news in self._live.values():
            news.put_nowait(reason)

    async def abort(self, rid: str) -> bool:
        if rid not in self._live:
            return False
        self._head().tell(AbortRequested(rid=rid))
        return True

    async def flush(self, tiers: Sequence[str]) -> None:
        """Told to all ranks before their next tick; asked about afterwards, so it has happened."""
        self._head().tell(FlushRequested(tiers=tuple(tiers)))
        await self.rank_stats()

    def command(self, command: Command) -> None:
        """Any other command for the decode ranks."""
        self._head().tell(command)

    async def rank_stats(self) -> list[object]:
        """One answer a rank; the question travels through rank 0 to all of them."""
        head = self._head()
        number = next(self._numbers)
        asked = list(self.ranks)
        answers = [line.expect(number) for line in asked]
        try:
            head.tell(StatsAsked(number=number))
            return list(await asyncio.wait_for(asyncio.gather(*answers), ANSWER_S))
        except TimeoutError:
            raise EngineDownError(f"a decode rank did not answer within {ANSWER_S:g} s") from None
        finally:
            for line in asked:
                line.expect_no_more(number)

    async def prefill_stats(self) -> object:
        if self.prefill is None:
            return None
        return await self.prefill.ask(lambda number: StatsAsked(number=number))

    async def score(self, tokens: Sequence[int], start: int) -> tuple[float, ...]:
        if self.prefill is None:
            raise EngineRefusedError(
                "log-probabilities of a prompt need a prefill process of this worker: "
                "serve with --role both, or leave logprob_start_len out"
            )
        answer = await self.prefill.ask(
            lambda number: ScoreAsked(number=number, tokens=tuple(tokens), start=start)
        )
        return msgspec.convert(answer, tuple[float, ...])

    async def info(self) -> dict[str, object]:
        stats = await self.rank_stats() if self.ranks else []
        return {
            **self.info_base,
            "uptime_s": time.time() - self._started_s,
            "requests_live": len(self._live),
            "requests_ended": dict(self._n_ended),
            "ranks": stats,
            "prefill": await self.prefill_stats(),
        }

    async def metrics_text(self) -> str:
        lines = [
            "# HELP kvlift_worker_requests_live Requests that the HTTP server waits for.",
            "# TYPE kvlift_worker_requests_live gauge",
            f"kvlift_worker_requests_live {len(self._live)}",
            "# HELP kvlift_worker_requests_total Requests that have ended, by how.",
            "# TYPE kvlift_worker_requests_total counter",
            *(
                f'kvlift_worker_requests_total{{outcome="{kind}"}} {count}'
                for kind, count in sorted(self._n_ended.items())
            ),
        ]
        parts = ["\n".join(lines) + "\n"]
        if self.ranks:
            text = await self.ranks[0].ask(lambda number: MetricsAsked(number=number))
            parts.append(str(text))
        return "".join(parts)
