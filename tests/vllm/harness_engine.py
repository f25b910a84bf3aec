"""A vLLM engine in a process of its own, whose scheduler and blocks a test can look at."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import attrs

from tests.vllm.harness import INSIDE, environment, vllm_python
from tests.vllm.harness_pairs import kvlift_transfer

ANSWER_S: Final = 120.0
START_S: Final = 420.0


class EngineEnded(RuntimeError):
    """The process is gone; the message quotes its last lines."""


@attrs.define(eq=False)
class EngineProcess:
    """`transfer`: the object of `--kv-transfer-config`, None for vLLM alone."""

    name: str
    model: Path
    folder: Path
    transfer: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = attrs.field(factory=dict)
    env: Mapping[str, str] = attrs.field(factory=dict)
    _child: "subprocess.Popen[str] | None" = None
    _answers: dict[int, dict[str, Any]] = attrs.field(factory=dict)
    _news: threading.Condition = attrs.field(factory=threading.Condition)
    _n_sent: int = 0
    _is_over: bool = False

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self) -> Self:
        """Returns at once; `wait_ready` waits."""
        orders = {
            "model": str(self.model),
            "transfer": self.transfer,
            "options": {"max_model_len": 4096, **self.options},
        }
        reader, writer = os.pipe()
        script = str(INSIDE / "engine.py")
        command = [str(vllm_python()), script, json.dumps(orders), str(writer)]
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                command,
                env=environment({"VLLM_LOGGING_LEVEL": "INFO", **self.env}),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
                text=True,
                start_new_session=True,
            )
        os.close(writer)
        threading.Thread(target=self._read, args=(reader,), daemon=True).start()
        return self

    def _read(self, reader: int) -> None:
        with os.fdopen(reader) as lines:
            for line in lines:
                answer = json.loads(line)
                with self._news:
                    self._answers[answer["number"]] = answer
                    self._news.notify_all()
        with self._news:
            self._is_over = True
            self._news.notify_all()

    def wait_ready(self) -> Self:
        self.answer(0, START_S)
        return self

    def send(self, do: str, **said: Any) -> int:
        """A command; its number, to wait for the answer with."""
        assert self._child is not None
        assert self._child.stdin is not None
        self._n_sent += 1
        self._child.stdin.write(json.dumps({"number": self._n_sent, "do": do, **said}) + "\n")
        self._child.stdin.flush()
        return self._n_sent

    def answer(self, number: int, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        with self._news:
            arrived = self._news.wait_for(
                lambda: number in self._answers or self._is_over, timeout_s
            )
            if number in self._answers:
                return self._answers.pop(number)
        why = "has ended" if arrived else f"did not answer within {timeout_s:g} s"
        raise EngineEnded(f"{self.name} {why}:\n{self.tail()}")

    def answered(self) -> list[int]:
        """Numbers of commands whose answers are here."""
        with self._news:
            return list(self._answers)

    def do(self, command: str, **said: Any) -> dict[str, Any]:
        return self.answer(self.send(command, **said))

    def ask(
        self, tokens: Sequence[int], timeout_s: float = ANSWER_S, **said: Any
    ) -> dict[str, Any]:
        """A request's whole answer: tokens, log-probabilities, cached tokens."""
        return self.answer(self.send("ask", tokens=list(tokens), **said), timeout_s)

    def look(self) -> dict[str, Any]:
        return self.do("look")

    def quiet(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Wait until the engine has nothing to do any more; how it stands then."""
        deadline = time.monotonic() + timeout_s
        while True:
            seen = self.look()
            if not seen["has_requests"]:
                return seen
            if time.monotonic() > deadline:
                raise EngineEnded(f"{self.name} is never quiet: {seen}\n{self.tail()}")
            time.sleep(0.05)

    def tail(self, n_lines: int = 40) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-n_lines:])

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait(20)

    def stop(self) -> None:
        child = self._child
        if child is None or child.stdin is None:
            return
        child.stdin.close()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(20)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def engine(name: str, model: Path, folder: Path, role: str | None, **extra: Any) -> EngineProcess:
    """An engine in one role with the connector's own config, or alone."""
    transfer = None if role is None else kvlift_transfer(role, **extra)
    return EngineProcess(name, model, folder, transfer)
