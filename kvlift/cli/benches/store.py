"""The file store beside raw O_DIRECT of the same bytes, by the same number of threads, in turns.

8 MiB pages, 1 GiB a round; every page that is read is compared with what was written.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
from attrs import define

from kvlift.cli.benches.row import Row, row
from kvlift.cli.output import Unusable
from kvlift.core.ids import Ticket
from kvlift.core.keys import KEY_BYTES
from kvlift.core.landed import PersistEnded, PrefetchEnded
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.effects.host_pool import HostPool
from kvlift.effects.ports import PageRun
from kvlift.effects.stores.files import FileStore

PAGE_BYTES = 8 << 20
N_PAGES = 64
N_ROUNDS = 3
N_THREADS = 4
GB = 1e9
NOTE = f"ceiling: raw O_DIRECT, {N_THREADS} threads; with the checksum"


@define
class Raw:
    """Plain files read and written past the page cache."""

    folder: Path
    pool: HostPool

    def write(self, page: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT
        file = os.open(self.folder / f"raw-{page}", flags, 0o600)
        try:
            assert os.pwritev(file, [self.pool.page_view(page)], 0) == PAGE_BYTES
        finally:
            os.close(file)

    def read(self, page: int) -> None:
        file = os.open(self.folder / f"raw-{page}", os.O_RDONLY | os.O_DIRECT)
        try:
            assert os.preadv(file, [self.pool.page_view(page)], 0) == PAGE_BYTES
        finally:
            os.close(file)

    def all_pages(self, work: Callable[[int], None]) -> float:
        """Seconds for all pages, by `N_THREADS` threads."""
        begin_s = time.perf_counter()
        with ThreadPoolExecutor(N_THREADS) as threads:
            list(threads.map(work, range(N_PAGES)))
        return time.perf_counter() - begin_s


def measure(progress: Callable[[str], None]) -> list[Row]:
    try:
        with tempfile.TemporaryDirectory(prefix="kvlift-bench-", dir=_disk()) as folder:
            return _measure(Path(folder), progress)
    except OSError as error:
        raise Unusable(
            f"can't measure in {_disk()} ({error.strerror}): set KVLIFT_BENCH_DIR to a folder "
            "on a disk with 2 GiB free"
        ) from None


def _disk() -> str:
    """A folder on a real disk; a memory file system has no O_DIRECT worth measuring."""
    return os.environ.get("KVLIFT_BENCH_DIR", str(Path.cwd()))


def _measure(folder: Path, progress: Callable[[str], None]) -> list[Row]:
    pool = HostPool(N_PAGES, PAGE_BYTES, pinned=False)
    spent: dict[str, list[float]] = {"raw-write": [], "raw-read": [], "write": [], "read": []}
    cpu: dict[str, list[float]] = {"write": [], "read": []}
    raw = Raw(folder, pool)
    for number in range(N_ROUNDS):
        progress(f"round {number + 1} of {N_ROUNDS}")
        truth = [os.urandom(64) * (PAGE_BYTES // 64) for _ in range(4)]
        for page in range(N_PAGES):
            pool.page_view(page)[:] = truth[page % 4]
        spent["raw-write"].append(raw.all_pages(raw.write))
        spent["raw-read"].append(raw.all_pages(raw.read))
        store = FileStore(folder / f"store-{number}", pool, n_threads=N_THREADS)
        prompt = Prompt(bytes(KEY_BYTES), token_bytes(range(64 * N_PAGES)), 64)
        run = PageRun(prompt, tuple(range(N_PAGES)))
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        store.start_persist(Ticket(1), run, list(range(N_PAGES)))
        assert _end_of(store) == PersistEnded(Ticket(1), N_PAGES)
        spent["write"].append(time.perf_counter() - begin_s)
        cpu["write"].append(time.process_time() - begin_cpu_s)
        for page in range(N_PAGES):
            pool.page_view(page)[:64] = bytes(64)
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        store.start_prefetch(Ticket(2), run, list(range(N_PAGES)))
        assert _end_of(store) == PrefetchEnded(Ticket(2), N_PAGES)
        spent["read"].append(time.perf_counter() - begin_s)
        cpu["read"].append(time.process_time() - begin_cpu_s)
        for page in range(N_PAGES):
            assert pool.page_view(page) == truth[page % 4], "a page came back different"
        assert store.close(10)
        _clear(folder / f"store-{number}")
    size = N_PAGES * PAGE_BYTES / GB
    rates = {case: size / statistics.median(seconds) for case, seconds in spent.items()}
    return [
        attrs.evolve(
            row(f"{case}-8MiB", rates[case], "GB/s", rates[f"raw-{case}"], NOTE),
            more={"cpu_s_a_gb": round(statistics.median(cpu[case]) / size, 4)},
        )
        for case in ("read", "write")
    ]


def _end_of(store: FileStore) -> PersistEnded | PrefetchEnded:
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        for report in store.landed():
            if isinstance(report, PersistEnded | PrefetchEnded):
                return report
        time.sleep(0.0005)
    raise TimeoutError("the store has not answered within 120 s")


def _clear(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
