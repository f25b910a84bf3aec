"""From files in the page cache to the device: the two stages alone, one after the other, together.

`storage-to-device-1GiB` is what the core orders: the restore starts when the read has ended.
`/pipelined` starts it in pieces, as the read goes on; the driver does not do that yet.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import torch

from kvlift.cli.benches.copies.rates import DEFAULT
from kvlift.cli.benches.copies.recorder import Recorder
from kvlift.cli.benches.copies.setup import (
    DEVICE,
    AnyCopies,
    Setup,
    finish,
    layered_setup,
    new_ticket,
    on_device,
    opened,
    randomise,
    synchronize,
)
from kvlift.core.keys import KEY_BYTES
from kvlift.core.landed import PersistEnded, PrefetchEnded, PrefetchProgressed
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.effects.layout import PageLayout
from kvlift.effects.ports import PageRun
from kvlift.effects.stores.files import FileStore
from kvlift.effects.stores.page_file import Caching

PIECE_PAGES: Final = 16
N_THREADS: Final = min(8, os.cpu_count() or 1)
ANSWER_S: Final = 60.0
WAYS: Final = ("read", "restore", "sequence", "pipelined")


def storage_to_device(bench: Recorder, layout: PageLayout, n_pages: int) -> None:
    name = f"storage-to-device-{n_pages * layout.page_bytes / (1 << 30):g}GiB"
    with bench.case(name), layered_setup(layout, n_pages) as setup:
        place = os.environ.get("KVLIFT_BENCH_DIR")
        with tempfile.TemporaryDirectory(prefix="kvlift-bench-", dir=place) as folder:
            _measure(bench, name, setup, Path(folder))


def _measure(bench: Recorder, name: str, setup: Setup, folder: Path) -> None:
    store = FileStore(folder / "store", setup.host, n_threads=N_THREADS, caching=Caching.BUFFERED)
    prompt = Prompt(bytes(KEY_BYTES), token_bytes(range(len(setup.host_pages))), 1)
    run = PageRun(prompt, tuple(range(len(setup.host_pages))))
    randomise(setup.host.tensor())
    truth = setup.host.tensor()[list(setup.host_pages)].clone()
    store.start_persist(new_ticket(), run, setup.host_pages)
    _until_ended(store)
    spent: dict[str, list[float]] = {way: [] for way in WAYS}
    with opened(setup, DEFAULT) as copies:
        for _ in range(bench.n_rounds + 1):
            for way in WAYS:
                _spoil(setup, way)
                begin_s = time.perf_counter()
                if way == "pipelined":
                    _pipelined(store, run, copies, setup)
                if way in ("read", "sequence"):
                    _read(store, run, setup)
                if way in ("restore", "sequence"):
                    _restore(copies, setup)
                spent[way].append(time.perf_counter() - begin_s)
                if way != "read":
                    _check(setup, truth)
    assert store.close(ANSWER_S)
    seconds = {way: statistics.median(times[1:]) for way, times in spent.items()}
    slower_ms = max(seconds["read"], seconds["restore"]) * 1e3
    for way, case in (("sequence", name), ("pipelined", f"{name}/pipelined")):
        bench.add(
            case,
            seconds[way] * 1e3,
            "ms",
            ceiling=slower_ms,
            ratio=seconds[way] * 1e3 / slower_ms,
            note="ceiling: the slower of reading and restoring alone",
            read_gbs=setup.size_bytes / seconds["read"] / 1e9,
            restore_gbs=setup.size_bytes / seconds["restore"] / 1e9,
            n_threads=N_THREADS,
        )


def _read(store: FileStore, run: PageRun, setup: Setup) -> None:
    store.start_prefetch(new_ticket(), run, setup.host_pages)
    _until_ended(store)


def _restore(copies: AnyCopies, setup: Setup) -> None:
    copies.start_restore(new_ticket(), setup.host_pages, setup.device_pages)
    finish(copies, 1, len(setup.host_pages))


def _pipelined(store: FileStore, run: PageRun, copies: AnyCopies, setup: Setup) -> None:
    n_pages = len(setup.host_pages)
    store.start_prefetch(new_ticket(), run, setup.host_pages)
    n_started = n_jobs = n_ended = 0
    until_s = time.monotonic() + ANSWER_S
    while n_started < n_pages or n_ended < n_jobs:
        n_ended += len(copies.landed())
        for report in store.landed():
            assert isinstance(report, PrefetchProgressed | PrefetchEnded)
            is_over = isinstance(report, PrefetchEnded)
            if report.n_pages - n_started >= (1 if is_over else PIECE_PAGES):
                part = slice(n_started, report.n_pages)
                copies.start_restore(new_ticket(), setup.host_pages[part], setup.device_pages[part])
                n_started = report.n_pages
                n_jobs += 1
            assert not is_over or n_started == n_pages, "the read ended short"
        if time.monotonic() > until_s:
            raise TimeoutError("the store has not answered")
        time.sleep(0.00005)


def _until_ended(store: FileStore) -> None:
    until_s = time.monotonic() + ANSWER_S
    while time.monotonic() < until_s:
        for report in store.landed():
            if isinstance(report, PersistEnded | PrefetchEnded):
                return
        time.sleep(0.00005)
    raise TimeoutError("the store has not answered")


def _spoil(setup: Setup, way: str) -> None:
    """What is to be filled holds something else; a restore alone keeps what the host has."""
    if way != "restore":
        setup.host.tensor()[:, :64].zero_()
    for piece in on_device(setup.memory):
        piece.zero_()
    synchronize()


def _check(setup: Setup, truth: torch.Tensor) -> None:
    pages = torch.cat([p[list(setup.device_pages)] for p in on_device(setup.memory)], dim=1)
    if not torch.equal(pages, truth.to(DEVICE)):
        raise RuntimeError("wrong bytes on the device")
