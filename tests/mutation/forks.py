"""Work in forks of this process, a few at a time, with limits of time and memory."""

import gc
import json
import os
import resource
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final, NoReturn, TypeAlias

from attrs import define, frozen

WALL_S_MAX: Final = 400.0
"""For one fork, whatever it does."""

MEMORY_BYTES: Final = 3_000_000_000
"""More than this, beside what the loaded process has, no fork may ask for."""

Tell: TypeAlias = Callable[[Any], None]
Task: TypeAlias = Callable[[Tell], None]


@frozen
class Answer:
    """What a fork said, in order, and how it ended: a signal's number, or 0."""

    said: list[Any]
    ended_by: int
    cpu_s: float


@define
class _Fork:
    number: int
    pid: int
    began_s: float
    text: bytes = b""


def forked(
    tasks: Iterable[Task], n_processes: int, on_answer: Callable[[int, Answer], None]
) -> None:
    """Run each task in a fork; `on_answer` is given its number and what it said.

    A task is asked for when its fork begins: it may depend on earlier answers."""
    gc.collect()
    gc.freeze()  # forks do not copy what they only count
    waiting = enumerate(tasks)
    with selectors.DefaultSelector() as selector:
        for number, task in islice(waiting, n_processes):
            _begin(number, task, selector)
        while selector.get_map():
            for key, _ in selector.select(timeout=1.0):
                fork: _Fork = key.data
                heard = os.read(key.fd, 1 << 16)
                fork.text += heard
                if not heard:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    on_answer(fork.number, _ended(fork))
                    for number, task in islice(waiting, 1):
                        _begin(number, task, selector)
            for key in list(selector.get_map().values()):
                if time.monotonic() - key.data.began_s > WALL_S_MAX:
                    os.kill(key.data.pid, signal.SIGKILL)
    gc.unfreeze()


def _begin(number: int, task: Task, selector: selectors.BaseSelector) -> None:
    reads, writes = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        _work(task, writes)
    os.close(writes)
    fork = _Fork(number, pid, time.monotonic())
    selector.register(reads, selectors.EVENT_READ, fork)


def _work(task: Task, writes: int) -> NoReturn:
    """The fork: nothing that it prints is seen, and nothing runs at its end."""
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        with open("/proc/self/statm", encoding="ascii") as file:
            n_bytes = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        task(lambda value: _write(writes, json.dumps(value).encode() + b"\n"))
    except BaseException as error:  # noqa: BLE001  (a fork must not go on as its parent)
        _write(writes, json.dumps({"raised": f"{type(error).__name__}: {error}"}).encode() + b"\n")
    finally:
        os._exit(0)


def _write(number: int, text: bytes) -> None:
    while text:
        text = text[os.write(number, text) :]


def _ended(fork: _Fork) -> Answer:
    _, status, usage = os.wait4(fork.pid, 0)
    said = [json.loads(line) for line in fork.text.split(b"\n")[:-1]]  # whole lines
    by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return Answer(said, by, usage.ru_utime + usage.ru_stime)


def limit_cpu(seconds: float) -> None:
    """End this process when it has used that much more processor time."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
