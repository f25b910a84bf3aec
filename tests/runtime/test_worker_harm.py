"""Parts of the reference worker where somebody leaves, dies, or does not listen."""

import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvlift.core.prompt import Prompt, token_bytes
from kvlift.effects.ports import RankLost
from kvlift.runtime.prefill_requests import Asked, Ended, How
from kvlift.runtime.worker import children
from kvlift.runtime.worker.beats import BeatReceiver, BeatSender
from kvlift.runtime.worker.children import Child, Voices
from kvlift.runtime.worker.front import Line, RemoteEngine
from kvlift.runtime.worker.generation import (
    EngineDownError,
    EngineRefusedError,
    Finish,
    FinishKind,
    Output,
    Request,
    Sampling,
)
from kvlift.runtime.worker.messages import AbortRequested, Beat, Command, StatsAsked, Submitted
from kvlift.runtime.worker.prefill_process import Link, Pages, PrefillProcess

# Rank 0's beats


@pytest.mark.parametrize("is_asked_to_end", [False, True])
def test_rank_0_does_not_wait_for_ever_for_a_rank_that_has_gone(*, is_asked_to_end: bool) -> None:
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        sender = BeatSender(folder, "g", 2, 60.0 if is_asked_to_end else 0.2, stop)
        receiver = BeatReceiver(folder, "g", 1, 5.0, threading.Event())
        sender.send(Beat(1, [], []))
        assert receiver.receive() == Beat(1, [], [])
        receiver.close()
        time.sleep(0.1)
        if is_asked_to_end:
            stop.set()
        raised: list[BaseException] = []

        def send() -> None:
            try:
                for number in range(2, 9):  # one may be queued while libzmq takes note
                    sender.send(Beat(number, [], []))
            except RankLost as error:
                raised.append(error)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        thread.join(10)
        assert raised
        assert cast("RankLost", raised[0]).ranks == (1,)
        sender.close()


# What children say


@pytest.fixture
def folder_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


class Mouth:
    """A standard error that fails, or waits."""

    def __init__(self, *, is_broken: bool) -> None:
        self.is_broken = is_broken
        self.goes_on = threading.Event()

    def write(self, _text: str) -> int:
        if self.is_broken:
            raise BrokenPipeError
        self.goes_on.wait(20)
        return 0

    def flush(self) -> None: ...


@pytest.fixture
def mouth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mouth]:
    mouth = Mouth(is_broken=request.param)
    monkeypatch.setattr(sys, "stderr", mouth)
    yield mouth
    mouth.goes_on.set()


@pytest.mark.parametrize("mouth", [True, False], indirect=True, ids=["closed", "full"])
def test_a_child_goes_on_and_its_death_is_told_where_nobody_reads_what_it_says(
    mouth: Mouth, folder_of_modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "SAID_WITHIN_S", 0.1)
    code = "import sys\nfor _ in range(4000): print('x' * 100, file=sys.stderr)\nsys.exit(3)\n"
    (folder_of_modules / "talks_a_lot.py").write_text(code)
    deaths: list[str] = []
    told = threading.Event()

    def on_death(_child: Child, reason: str) -> None:
        deaths.append(reason)
        told.set()

    child = Child("rank 0", "talks_a_lot", cast("Any", None), on_death, Voices())
    assert told.wait(10)
    assert deaths[0].startswith("rank 0 ended (3)")
    child.end(time.monotonic())


# Ids of requests in the launcher


class Head:
    """Rank 0's line: keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Command] = []
        self.asked: set[int] = set()
        self.fault = ""

    def tell(self, command: Command) -> None:
        if self.fault:
            raise EngineDownError(self.fault)
        self.told.append(command)

    def expect(self, number: int) -> "asyncio.Future[object]":
        self.asked.add(number)
        return asyncio.get_running_loop().create_future()

    def expect_no_more(self, number: int) -> None:
        self.asked.discard(number)


def request_of(rid: str, tenant: str) -> Request:
    return Request(rid=rid, tokens=(1, 2), sampling=Sampling(), tenant=tenant)


def test_what_is_still_said_to_a_client_that_left_reaches_nobody_else() -> None:
    async def run() -> None:
        head = Head()
        engine = RemoteEngine(8, {}, [cast("Line", head)])
        of_first = engine.submit(request_of("r", "one"))
        begin = asyncio.ensure_future(anext(of_first))
        await asyncio.sleep(0)
        engine.take_outputs([Output(rid="r", tokens=(7,), logprobs=(0.0,))])
        await begin
        await of_first.aclose()  # type: ignore[attr-defined]
        assert head.told[-1:] == [AbortRequested(rid="r")]
        with pytest.raises(EngineRefusedError, match="is in use"):
            await anext(engine.submit(request_of("r", "another")))
        engine.take_outputs([Output(rid="r", tokens=(8,), logprobs=(0.0,))])
        engine.take_outputs([Output(rid="r", finish=Finish(kind=FinishKind.ABORT))])
        of_second = engine.submit(request_of("r", "another"))
        begin = asyncio.ensure_future(anext(of_second))
        await asyncio.sleep(0)
        assert head.told[-1:] == [Submitted(request=request_of("r", "another"))]
        done = Output(rid="r", tokens=(9,), logprobs=(0.0,), finish=Finish(kind=FinishKind.LENGTH))
        engine.take_outputs([done])
        assert await begin == done
        assert [output async for output in of_second] == []

    asyncio.run(run())


def test_ids_are_free_again_when_the_decode_worker_is_gone() -> None:
    async def run() -> None:
        engine = RemoteEngine(1, {}, [cast("Line", Head())])
        stream = engine.submit(request_of("r", ""))
        begin = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        engine.end_all("it is down")
        with pytest.raises(EngineDownError):
            await begin
        again = asyncio.ensure_future(anext(engine.submit(request_of("r", ""))))
        await asyncio.sleep(0)
        engine.take_outputs([Output(rid="r", finish=Finish(kind=FinishKind.LENGTH))])
        await again

    asyncio.run(run())


def test_a_question_that_nobody_answers_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlift.runtime.worker.front.ANSWER_S", 0.01)

    async def run() -> None:
        heads = [Head(), Head()]
        engine = RemoteEngine(8, {}, [cast("Line", head) for head in heads])
        with pytest.raises(EngineDownError, match="did not answer"):
            await engine.rank_stats()
        assert isinstance(heads[0].told[-1], StatsAsked)
        heads[0].fault = "it is down"
        with pytest.raises(EngineDownError, match="it is down"):
            await engine.rank_stats()
        assert not any(head.asked for head in heads)

    asyncio.run(run())


# Attempts at the prefill process


class Node:
    """A prefill node's side of the engine."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.over: list[Ended] = []
        self.tokens: list[tuple[str, int]] = []

    def poll(self) -> list[Asked]:
        asked, self.asked = self.asked, []
        return asked

    def ended(self) -> list[Ended]:
        over, self.over = self.over, []
        return over

    def page_ready(self, *_: object) -> None: ...

    def first_token(self, rid: str, attempt: int, *_: object) -> None:
        self.tokens.append((rid, attempt))


class SlowEngine:
    """Three steps a prompt."""

    def start(self, _prompt: Prompt) -> Any:
        class Run:
            n_reused = n_computed = n_pages_done = 0
            first: Any = None

        return Run()

    def step(self, run: Any) -> None:
        run.n_computed += 1
        if run.n_computed == 3:
            run.first = type("First", (), {"token": 1, "logprob": 0.0})()


class Silent:
    def commands(self, _timeout_s: float) -> list[Command]:
        return []


def test_the_end_of_an_attempt_that_waits_does_not_stop_the_one_that_is_computed() -> None:
    node, prompt = Node(), Prompt(bytes(32), token_bytes(range(8)), 4)
    process = PrefillProcess(
        cast("Any", node), cast("Any", SlowEngine()), Pages(Link(0)), cast("Any", Silent()), {}
    )
    node.asked = [Asked(cast("Any", "r"), cast("Any", n), prompt, 1) for n in (1, 2)]

    def turn() -> None:
        for ended in node.ended():
            process._forget(ended.rid, ended.attempt)
        process._queue.extend(node.poll())
        process._compute()

    turn()
    node.over = [Ended(cast("Any", "r"), cast("Any", 2), How.ABORTED)]
    for _ in range(3):
        turn()
    assert node.tokens == [("r", 1)]
    assert "r" in process.pages.runs, "its pages may still be read"
