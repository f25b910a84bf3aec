"""Random walks of a file store over a file system that fails, stalls, and changes under it.

Every byte that is reported is compared, pages that are given back are written over at once, every
call is answered once, and at the end nothing is left: no temporary file, descriptor or thread.
"""

import errno
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field

from kvlift.core.ids import Ticket
from kvlift.core.landed import LookupAnswered, PersistEnded, PrefetchEnded, PrefetchProgressed
from kvlift.core.prompt import Prompt
from kvlift.effects.ports import PageRun
from kvlift.effects.stores.files import FileStore
from kvlift.effects.stores.page_file import HEADER_BYTES
from tests.effects.store_conformance import PlainPages, new_ticket, prompt_of

PAGE_BYTES, N_PLACES, N_ACTS = 512, 24, 120
CALLS = (
    *("open", "close", "unlink", "rename", "mkdir", "lstat", "fstat", "utime", "scandir"),
    *("preadv", "pread", "pwritev", "pwrite", "ftruncate", "posix_fallocate"),
)
CODES = (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EACCES, errno.ENOENT, errno.ESTALE)
WORKER = "kvlift-store"


@define(eq=False)
class Weather:
    """What the store's threads see of the operating system."""

    source: random.Random
    rate: float = 0.0
    is_stalled: bool = False
    skew_ns: int = 0
    n_failed: int = 0
    calm: threading.Event = field(factory=threading.Event)

    def __attrs_post_init__(self) -> None:
        self.calm.set()

    def spoiled(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if not threading.current_thread().name.startswith(WORKER):
                return real(*args, **more)
            self.calm.wait(20)
            if self.source.random() >= self.rate:
                return real(*args, **more)
            self.n_failed += 1
            if name == "close" or (name in ("pwritev", "rename") and self.source.random() < 0.5):
                real(*args, **more)  # it has happened, and is said to have failed
            raise OSError(self.source.choice(CODES), "bad weather")

        return call


@define(eq=False)
class Run:
    prompt: Prompt
    positions: tuple[int, ...]
    kind: str
    places: tuple[int, ...]
    is_over: bool = False


def content(prompt: Prompt, position: int) -> bytes:
    word = prompt.tokens[: (position + 1) * 4 * prompt.page_tokens] + prompt.namespace
    seed = random.Random(word).randbytes(32)
    return (seed * (PAGE_BYTES // 32 + 1))[:PAGE_BYTES]


@define(eq=False)
class Walk:
    source: random.Random
    root: Path
    weather: Weather
    host: PlainPages = field(factory=lambda: PlainPages(N_PLACES, PAGE_BYTES))
    device: PlainPages = field(factory=lambda: PlainPages(N_PLACES, PAGE_BYTES))
    store: FileStore = field(init=False)
    runs: dict[Ticket, Run] = field(factory=dict)
    free: dict[str, set[int]] = field(init=False)
    counts: Counter[str] = field(factory=Counter)

    def __attrs_post_init__(self) -> None:
        self.free = {"host": set(range(N_PLACES)), "device": set(range(N_PLACES))}
        bound = self.source.choice([None, 12, 40])
        self.store = FileStore(
            self.root,
            self.host,
            self.device,
            n_threads=self.source.choice([1, 3]),
            size_bytes_max=None if bound is None else bound * (HEADER_BYTES + PAGE_BYTES),
        )

    def _run(self, kind: str, tier: str | None) -> tuple[Ticket, PageRun, tuple[int, ...]] | None:
        prompt = prompt_of(self.source.randrange(3), tenant=self.source.choice(["t", "u"]))
        start = self.source.choice([0, 0, 3])
        n_pages = self.source.randrange(1, prompt.n_pages_full - start + 1)
        positions = tuple(range(start, start + n_pages))
        places: tuple[int, ...] = ()
        if tier is not None:
            if len(self.free[tier]) < n_pages:
                return None
            places = tuple(self.source.sample(sorted(self.free[tier]), n_pages))
            self.free[tier] -= set(places)
        ticket = new_ticket()
        self.runs[ticket] = Run(prompt, positions, kind, places)
        return ticket, PageRun(prompt, positions), places

    def act(self) -> None:
        match self.source.randrange(12):
            case 0 | 1 if (made := self._run("lookup", None)) is not None:
                self.store.start_lookup(*made[:2])
            case 2 | 3 | 4 if (made := self._run("read", "host")) is not None:
                self.store.start_prefetch(*made)
            case 5 | 6 if (made := self._run("write", "host")) is not None:
                self._fill(self.host, made)
                self.store.start_persist(*made)
            case 7 | 8 if (made := self._run("write device", "device")) is not None:
                self._fill(self.device, made)
                self.store.start_persist_device(*made)
            case 9 if self.runs:
                ticket = self.source.choice(list(self.runs))
                self.store.cancel_prefetch(ticket)
                self.store.cancel_persist(ticket)
            case 10:
                self._change_weather()
            case 11 if self.source.random() < 0.2:
                self.store.forget_all()
            case _:
                time.sleep(0.002)
        self.hear()

    def _fill(self, memory: PlainPages, made: tuple[Ticket, PageRun, tuple[int, ...]]) -> None:
        _ticket, run, places = made
        for position, place in zip(run.positions, places, strict=True):
            memory.page_view(place)[:] = content(run.prompt, position)

    def _change_weather(self) -> None:
        self.weather.rate = self.source.choice([0.0, 0.0, 0.05, 0.3])
        self.weather.skew_ns = self.source.choice([0, 0, -7200, 7200, 1]) * 10**9
        self.weather.calm.set()
        match self.source.randrange(8):
            case 0 | 1:
                self.weather.calm.clear()
            case 2:
                shutil.rmtree(self.root / "v1" / "pages", ignore_errors=True)
            case 3:
                shutil.rmtree(self.root, ignore_errors=True)
            case 4:
                self._damage()
            case _:
                pass

    def _damage(self) -> None:
        for path in list(self.root.rglob("*.page"))[:2]:
            try:
                data = bytearray(path.read_bytes())
                data[self.source.randrange(len(data))] ^= 1
                path.write_bytes(data)
            except (OSError, ValueError):
                continue

    def hear(self) -> None:
        for report in self.store.landed():
            run = self.runs[report.ticket]
            assert not run.is_over, "two ends"
            match report:
                case LookupAnswered(n_pages=n_pages):
                    assert 0 <= n_pages <= len(run.positions)
                    self._end(report.ticket, None)
                case PrefetchProgressed(n_pages=n_pages):
                    self._compare(run, n_pages)
                case PrefetchEnded(n_pages=n_pages):
                    self._compare(run, n_pages)
                    self.counts["read"] += n_pages
                    self._end(report.ticket, "host")
                case PersistEnded(n_pages=n_pages):
                    assert 0 <= n_pages <= len(run.positions)
                    self.counts["written"] += n_pages
                    self._end(report.ticket, "device" if "device" in run.kind else "host")
                case _:
                    raise AssertionError(report)

    def _compare(self, run: Run, n_pages: int) -> None:
        for position, place in list(zip(run.positions, run.places, strict=True))[:n_pages]:
            assert self.host.content(place) == content(run.prompt, position), "a wrong byte"

    def _end(self, ticket: Ticket, tier: str | None) -> None:
        """What it used is somebody else's at once."""
        run = self.runs.pop(ticket)
        run.is_over = True
        if tier is not None:
            memory = self.host if tier == "host" else self.device
            for place in run.places:
                memory.page_view(place)[:] = b"\xee" * PAGE_BYTES
            self.free[tier] |= set(run.places)

    def until_idle(self) -> None:
        deadline_s = time.monotonic() + 20
        while self.runs:
            assert time.monotonic() < deadline_s, f"never answered: {self.runs}"
            self.hear()
            time.sleep(0.001)
        assert self.store._workers.wait_idle(20)

    def end(self) -> None:
        self.weather.rate, self.weather.skew_ns = 0.0, 0
        self.weather.calm.set()
        self.until_idle()
        # Unlike all before, this is not weather: the folder is there, and all works.
        for folder in ("pages", "unfinished"):
            (self.root / "v1" / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.store.forget_all()
        made = self._run("lookup", None)
        assert made is not None
        self.store.start_lookup(*made[:2])
        self.until_idle()
        assert not list(self.root.rglob("*.page")), "something is left behind a flush"
        made = self._run("write", "host")
        assert made is not None
        self._fill(self.host, made)
        n_before = self.counts["written"]
        self.store.start_persist(*made)
        self.until_idle()
        assert self.counts["written"] > n_before, "it never stores again"
        assert not self.store._runs
        assert not [run for run in self.store._let_go if run.is_at_work]
        assert all(thread.is_alive() for thread in self.store._workers._threads)
        assert self.store.close(10)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_file_system_does_bytes_are_right_and_nothing_is_left(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(seed)
    weather = Weather(random.Random(seed + 1))
    real_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + weather.skew_ns)
    for name in CALLS:
        monkeypatch.setattr(os, name, weather.spoiled(name, getattr(os, name)))
    n_fds = len(os.listdir("/proc/self/fd"))
    walk = Walk(source, tmp_path / "store", weather)
    for _ in range(N_ACTS):
        walk.act()
    walk.end()
    assert len(os.listdir("/proc/self/fd")) == n_fds, "descriptors are left"
