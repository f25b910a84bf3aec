"""Child processes: started from a list, told their orders by a pipe, watched, ended and reaped."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from attrs import define, field

from kvlift.runtime.worker.child import EXIT_FOLLOWED
from kvlift.runtime.worker.settings import ProcessOrders

LINES_KEPT: Final = 40
LINES_UNSAID_MAX: Final = 10_000
SAID_WITHIN_S: Final = 1.0
SAME_WITHIN_S: Final = 10.0
PACKAGE_ROOT: Final = Path(__file__).resolve().parents[3]


@define(eq=False)
class Voices:
    """What all children say goes to standard error, in whole lines, since they speak at once.

    What one rank has said of itself a moment ago, another need not say in full again."""

    _lock: threading.Lock = field(factory=threading.Lock, init=False)
    _said: dict[str, tuple[str, float]] = field(factory=dict, init=False)

    def say(self, name: str, line: str) -> None:
        words = line.removeprefix(f"{name}: ")
        now_s = time.monotonic()
        with self._lock:
            if words != line:
                before, at_s = self._said.get(words, ("", 0.0))
                if before not in ("", name) and now_s - at_s < SAME_WITHIN_S:
                    line = f"{name}: the same as {before}"
                else:
                    self._said = {words: (name, now_s)}
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()


@define(eq=False)
class Child:
    """One process. `on_death(child, reason)` is called from a thread of its own, once, unless the
    child was ended on purpose.

    What it says is always taken at once, also where nobody takes it from here: a child that logs
    must not stand still because a terminal does."""

    name: str
    module: str
    orders: ProcessOrders
    on_death: "Callable[[Child, str], None]"
    voices: Voices
    is_ending: bool = field(default=False, init=False)
    popen: "subprocess.Popen[bytes]" = field(init=False)
    _lines: deque[str] = field(factory=lambda: deque(maxlen=LINES_KEPT), init=False)
    _unsaid: "queue.SimpleQueue[str | None]" = field(factory=queue.SimpleQueue, init=False)
    _watch: threading.Thread = field(init=False)
    _speaker: threading.Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        paths = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            # Ranks of one machine: gloo would listen on the address of its host name.
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        # The secret goes through the pipe: a child's environment stays readable while it lives.
        inherited = {key: text for key, text in os.environ.items() if key != "KVLIFT_SECRET"}
        self.popen = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**inherited, **own},
            # Ctrl-C in a terminal goes to a whole group; a child hears of it from the launcher.
            process_group=0,
        )
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.write(msgspec.json.encode(self.orders) + b"\n")
            self.popen.stdin.flush()
        self._watch = threading.Thread(target=self._live, name=f"watch-{self.name}", daemon=True)
        self._speaker = threading.Thread(target=self._speak, name=f"say-{self.name}", daemon=True)
        self._speaker.start()
        self._watch.start()

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def is_alive(self) -> bool:
        return self.popen.poll() is None

    @property
    def followed_another(self) -> bool:
        """Whether it has ended because another rank failed, was late or lost."""
        return self.popen.poll() == EXIT_FOLLOWED

    def _live(self) -> None:
        assert self.popen.stderr is not None
        for raw in self.popen.stderr:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            if self._unsaid.qsize() < LINES_UNSAID_MAX:
                self._unsaid.put(line)
        self._unsaid.put(None)
        code = self.popen.wait()
        self._speaker.join(SAID_WITHIN_S)
        if not self.is_ending:
            self.on_death(self, self.reason(code))

    def _speak(self) -> None:
        while (line := self._unsaid.get()) is not None:
            self.voices.say(self.name, line)

    def reason(self, code: int) -> str:
        """How it ended: a signal by name, or the last line that it wrote."""
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"{self.name} was ended by {signal.Signals(-code).name}"
        last = next((line for line in reversed(self._lines) if line.strip()), "without a word")
        return last if last.startswith(self.name) else f"{self.name} ended ({code}): {last}"

    def ask_to_end(self) -> None:
        """Closing its orders' pipe is the sign; a signal wakes it where it sleeps."""
        self.is_ending = True
        assert self.popen.stdin is not None
        with contextlib.suppress(OSError):
            self.popen.stdin.close()
        if self.is_alive:
            self.popen.terminate()

    def end(self, until_s: float) -> None:
        """Wait until `until_s` (monotonic), then kill; reaped in any case."""
        self.is_ending = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(max(0.0, until_s - time.monotonic()))
        if self.is_alive:
            self.popen.kill()
        self.popen.wait()
        self._watch.join(2 * SAID_WITHIN_S)


def end_all(children: list[Child], deadline_s: float) -> None:
    """Ask all, then wait for all together up to the deadline."""
    for child in children:
        child.ask_to_end()
    until_s = time.monotonic() + deadline_s
    for child in children:
        child.end(until_s)
