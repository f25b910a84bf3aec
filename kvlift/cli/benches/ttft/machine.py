"""What all plays share: both models, decode's memory and host pool, the rates of this machine."""

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from attrs import define, field, frozen

from kvlift.cli.benches.ttft.batch import DecodeStep
from kvlift.cli.benches.ttft.model import Model
from kvlift.cli.benches.ttft.pages import Fingerprints, words_of_memory
from kvlift.cli.benches.ttft.prefill import Prefill
from kvlift.cli.benches.ttft.sizes import Sizes
from kvlift.cli.benches.ttft.stage import Stage
from kvlift.cli.benches.ttft.workload import Turn
from kvlift.core.ids import Ticket
from kvlift.core.keys import Namespace
from kvlift.core.landed import PersistEnded, PrefetchEnded, RestoreEnded
from kvlift.core.prompt import Prompt
from kvlift.effects.copies_cpu import CpuCopies
from kvlift.effects.device_memory import LayeredMemory
from kvlift.effects.host_pool import HostPool
from kvlift.effects.ports import Copies, PageRun, Store
from kvlift.effects.stores.files import FileStore

WEIGHTS_SEED = 11
STAGE_PAGES = 8
N_PAGES_TIMED = 128
ANSWER_S = 120.0


@frozen(kw_only=True)
class Rates:
    """Measured before the plays, with nothing beside: bytes a second, and seconds."""

    restore_bytes_s: float
    storage_bytes_s: float
    prefill_s_by_round: tuple[float, ...]
    chunks_s_by_round: tuple[tuple[float, ...], ...]
    step_ms: float


@define(eq=False)
class Machine:
    sizes: Sizes
    prefill: Prefill
    step: DecodeStep
    memory: LayeredMemory
    words: torch.Tensor
    prints: Fingerprints
    pool: HostPool
    stage: Stage
    folder: Path
    n_gpus: int
    n_stores: int = field(default=0, init=False)

    @classmethod
    @contextmanager
    def opened(
        cls, sizes: Sizes, folder: Path | None, progress: Callable[[str], None]
    ) -> Iterator["Machine"]:
        """Prefill gets the second GPU where there is one. `folder`: where storage's files lie."""
        n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        decode_on = torch.device("cuda:0" if n_gpus else "cpu")
        prefill_on = torch.device("cuda:1") if n_gpus > 1 else decode_on
        progress("the models")
        model = Model.random(sizes, decode_on, WEIGHTS_SEED)
        other = model
        if prefill_on != decode_on:
            other = Model.random(sizes, prefill_on, WEIGHTS_SEED)
        progress("the pages")
        # One page more than the driver has: where rows without a request write.
        memory = LayeredMemory.allocate(sizes.layout, sizes.device_pages + 1, decode_on)
        words = words_of_memory(memory)
        progress("the host pool")
        with tempfile.TemporaryDirectory(prefix="kvlift-bench-", dir=folder) as place:
            size_bytes = sizes.n_conversations * sizes.n_pages_max * memory.page_bytes
            with _room_made(Path(place) / "room", size_bytes):
                pool = HostPool(sizes.host_pages, memory.page_bytes)
            yield cls(
                sizes=sizes,
                prefill=Prefill.allocate(other),
                step=DecodeStep(model, memory),
                memory=memory,
                words=words,
                prints=Fingerprints(words.shape[0], words.shape[2], decode_on),
                pool=pool,
                stage=Stage(prefill_on, words, STAGE_PAGES),
                folder=Path(place),
                n_gpus=n_gpus,
            )

    def copies(self, on_landed: Callable[[], None] | None = None) -> Copies:
        """Of CUDA, beside the decode step: the plays never start a copy of a page in use."""
        if self.memory.device.type == "cuda":
            from kvlift.effects.copies_cuda import CudaCopies, CudaOptions

            options = CudaOptions(is_ordered=False)
            return CudaCopies(self.pool, self.memory, options=options, on_landed=on_landed)
        return CpuCopies(self.pool, self.memory, on_landed=on_landed)

    def store(self, on_landed: Callable[[], None] | None = None) -> FileStore:
        """A new one, empty."""
        self.n_stores += 1
        return FileStore(
            self.folder / f"store-{self.n_stores}",
            self.pool,
            self.memory,
            n_threads=self.sizes.n_store_threads,
            on_landed=on_landed,
        )

    def namespace(self, salt: str) -> bytes:
        return Namespace(salt=salt, page_tokens=self.sizes.page_tokens).digest()

    def measured(self, tokens: list[bytes], progress: Callable[[str], None]) -> Rates:
        """The rates of this machine; also warms everything up."""
        progress("rates of copies and storage")
        restore_s, storage_s = self._tier_seconds(tokens[0])
        progress("prefill alone")
        first, chunks = self._prefill_seconds(tokens[0])
        return Rates(
            restore_bytes_s=self.memory.page_bytes / restore_s,
            storage_bytes_s=self.memory.page_bytes / storage_s,
            prefill_s_by_round=first,
            chunks_s_by_round=chunks,
            step_ms=self._step_ms(),
        )

    def _prefill_seconds(
        self, tokens: bytes
    ) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
        sizes = self.sizes
        self.prefill.forget()
        warm = Turn(0, 0, 0.0, tokens[: sizes.chunk_tokens * 4], b"")
        self.prefill.compute(warm)
        self.prefill.forget()
        chunks = []
        for number, n_tokens in enumerate(sizes.prompt_tokens):
            turn = Turn(0, number, 0.0, tokens[: n_tokens * 4], b"")
            self.prefill.compute(turn)
            chunks.append(tuple(self.prefill.computed[turn.rid].chunks_s))
        self.prefill.forget()
        return tuple(sum(each) for each in chunks), tuple(chunks)

    def _tier_seconds(self, tokens: bytes) -> tuple[float, float]:
        """Seconds a page from the host to the device, and from storage to the host."""
        n_pages = min(N_PAGES_TIMED, self.pool.n_pages, self.sizes.device_pages)
        n_pages = min(n_pages, self.sizes.prompt_tokens[-1] // self.sizes.page_tokens)
        places = list(range(n_pages))
        self.pool.tensor()[:n_pages].random_(0, 256)
        copies, store = self.copies(), self.store()
        prompt = Prompt(self.namespace("rates"), tokens, self.sizes.page_tokens)
        run = PageRun(prompt, tuple(places))
        store.start_persist(Ticket(1), run, places)
        assert _answer(store) == PersistEnded(Ticket(1), n_pages)
        restores, reads = [], []
        for number in range(3):
            begin_s = time.perf_counter()
            copies.start_restore(Ticket(10 + number), places, places)
            assert _answer(copies) == RestoreEnded(Ticket(10 + number), n_pages)
            restores.append(time.perf_counter() - begin_s)
            begin_s = time.perf_counter()
            store.start_prefetch(Ticket(20 + number), run, places)
            assert _answer(store) == PrefetchEnded(Ticket(20 + number), n_pages)
            reads.append(time.perf_counter() - begin_s)
        copies.close(10)
        store.forget_all()
        store.close(10)
        return statistics.median(restores) / n_pages, statistics.median(reads) / n_pages

    def _step_ms(self) -> float:
        """An empty batch: what the weights alone cost."""
        times = []
        for _ in range(20):
            begin_s = time.perf_counter()
            self.step.launch(self.step.tables[0])
            self.synchronize()
            times.append((time.perf_counter() - begin_s) * 1e3)
        return statistics.median(times)

    def synchronize(self) -> None:
        if self.n_gpus:
            torch.cuda.synchronize(self.memory.device)


@contextmanager
def _room_made(path: Path, size_bytes: int) -> Iterator[None]:
    """Beside what is done inside, a file as large as storage becomes: where it lies in memory, a
    machine that grows its memory on first use has grown it then. It is gone afterwards."""

    def make() -> None:
        with suppress(OSError), path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)

    thread = threading.Thread(target=make)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        path.unlink(missing_ok=True)


def _answer(port: Copies | Store) -> PersistEnded | PrefetchEnded | RestoreEnded:
    until_s = time.monotonic() + ANSWER_S
    while time.monotonic() < until_s:
        for report in port.landed():
            if isinstance(report, PersistEnded | PrefetchEnded | RestoreEnded):
                return report
        time.sleep(0.0002)
    raise TimeoutError("a copy or the store has not answered")
