"""From files in the page cache to the device: the two stages alone, one after the other, together.

`storage-to-device-1GiB` is what the core's local half orders: the restore goes up in pieces while
the read goes on, with a tick as often as there may be news; `/tick-8ms`: one as often as a decode
step ends. `/sequence` starts the restore when the read has ended.
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
from kvlift.core.effect import Effect, StartPrefetch, StartRestore
from kvlift.core.hear import hear, order
from kvlift.core.ids import DeviceHandle, HostHandle
from kvlift.core.keys import KEY_BYTES
from kvlift.core.landed import PersistEnded, PrefetchEnded
from kvlift.core.local import Limits, Local
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.effects.layout import PageLayout
from kvlift.effects.ports import PageRun
from kvlift.effects.stores.files import FileStore
from kvlift.effects.stores.page_file import Caching

N_THREADS: Final = min(8, os.cpu_count() or 1)
ANSWER_S: Final = 60.0
POLL_S: Final = 0.00005
STEP_S: Final = 0.008
WAYS: Final = ("read", "restore", "sequence", "ordered", "ordered in steps")
LIMITS: Final = Limits()


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
                if way == "ordered":
                    _ordered(store, run, copies, setup, POLL_S)
                if way == "ordered in steps":
                    _ordered(store, run, copies, setup, STEP_S)
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
    cases = (
        ("ordered", name),
        ("ordered in steps", f"{name}/tick-8ms"),
        ("sequence", f"{name}/sequence"),
    )
    for way, case in cases:
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


def _ordered(
    store: FileStore, run: PageRun, copies: AnyCopies, setup: Setup, tick_s: float
) -> None:
    """As on one rank of a driver: the core's local half between the two ports."""
    read, restore = new_ticket(), new_ticket()
    wanted = StartPrefetch(
        ticket=read,
        prompt=run.prompt,
        start=0,
        host=tuple(map(HostHandle, setup.host_pages)),
        restore=restore,
        device=tuple(map(DeviceHandle, setup.device_pages)),
    )
    local, started = order(Local(), LIMITS, (wanted,), (), time.monotonic_ns())
    until_s = time.monotonic() + ANSWER_S
    while True:
        for effect in started:
            _start(effect, store, run, copies)
        if local.watches[restore].has_ended:
            break
        if time.monotonic() > until_s:
            raise TimeoutError("the store has not answered")
        time.sleep(tick_s)
        local, started = hear(
            local, LIMITS, (*store.landed(), *copies.landed()), time.monotonic_ns()
        )
    assert local.watches[restore].progress == len(setup.host_pages), "the read ended short"


def _start(effect: Effect, store: FileStore, run: PageRun, copies: AnyCopies) -> None:
    match effect:
        case StartPrefetch(ticket=ticket, host=host):
            store.start_prefetch(ticket, run, host)
        case StartRestore(ticket=ticket, host=host, device=device, start=start):
            copies.start_restore(ticket, host, device, start)
        case _:
            raise AssertionError(f"{effect} is not part of a read")


def _until_ended(store: FileStore) -> None:
    until_s = time.monotonic() + ANSWER_S
    while time.monotonic() < until_s:
        for report in store.landed():
            if isinstance(report, PersistEnded | PrefetchEnded):
                return
        time.sleep(POLL_S)
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
