"""The prefill side: one prompt after the other, in chunks, on top of what it has of a conversation.

Its prefix cache is each conversation's KV, kept whole. Pages may leave as soon as their chunk is
computed; those of earlier rounds at once.
"""

import queue
import threading
import time
from collections.abc import Callable

import torch
from attrs import define, field

from kvlift.cli.benches.ttft.model import Model
from kvlift.cli.benches.ttft.pages import Fingerprints, words_of_kv
from kvlift.cli.benches.ttft.workload import Turn


@define(eq=False)
class Kept:
    """One conversation's KV `[n_slices, n_tokens, kv_heads, dim]`; of it `n_computed` tokens."""

    kv: torch.Tensor
    words: torch.Tensor
    prints: torch.Tensor
    """Fingerprints of the pages, int64, on this device."""

    n_computed: int = 0


@define
class Computed:
    """When prefill began a request, and how long each of its chunks took; seconds."""

    begun_s: float
    chunks_s: list[float] = field(factory=list)
    n_tokens_before: int = 0


@define(eq=False)
class Prefill:
    """A thread that computes what it is asked for, first come first served."""

    model: Model
    kept: list[Kept]
    prints: Fingerprints
    computed: dict[str, Computed] = field(factory=dict, init=False)
    on_pages: Callable[[], None] = field(default=lambda: None, init=False)
    on_token: Callable[[str], None] = field(default=lambda _rid: None, init=False)
    _asked: "queue.SimpleQueue[Turn | None]" = field(factory=queue.SimpleQueue, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    error: BaseException | None = field(default=None, init=False)
    _stream: torch.cuda.Stream | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        if self.model.device.type == "cuda":
            # Its own stream: where both sides share a GPU, decode's must not queue behind it.
            self._stream = torch.cuda.Stream(self.model.device)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(self.model.device)

    @classmethod
    def allocate(cls, model: Model) -> "Prefill":
        sizes = model.sizes
        layout = sizes.layout
        shape = (layout.n_slices, sizes.n_tokens_max, sizes.n_kv_heads, sizes.head_dim)
        kept = []
        for _ in range(sizes.n_conversations):
            kv = torch.zeros(shape, dtype=layout.torch_dtype, device=model.device)
            prints = torch.zeros(sizes.n_pages_max, dtype=torch.int64, device=model.device)
            kept.append(Kept(kv, words_of_kv(kv, sizes.page_tokens), prints))
        words = layout.slice_bytes // 8
        return cls(model, kept, Fingerprints(layout.n_slices, words, model.device))

    def forget(self) -> None:
        """Begin anew: no prefix is cached, nothing has been computed."""
        self.computed.clear()
        for kept in self.kept:
            kept.n_computed = 0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._live, name="bench-prefill", daemon=True)
        self._thread.start()

    def ask(self, turn: Turn) -> None:
        self._asked.put(turn)

    def stop(self) -> None:
        """After what has been asked for."""
        self._asked.put(None)
        if self._thread is not None:
            self._thread.join()

    def _live(self) -> None:
        try:
            while (turn := self._asked.get()) is not None:
                self.compute(turn)
        except BaseException as error:  # noqa: BLE001 - raised again by the play
            self.error = error

    def compute(self, turn: Turn) -> None:
        """One request; a chunk is queued on the device while the one before it is computed."""
        with torch.cuda.stream(self._stream):
            self._compute(turn)
        self.on_token(turn.rid)

    def _compute(self, turn: Turn) -> None:
        kept = self.kept[turn.conversation]
        record = Computed(time.perf_counter(), n_tokens_before=kept.n_computed)
        self.computed[turn.rid] = record
        whole = torch.frombuffer(bytearray(turn.tokens), dtype=torch.int32).long()
        start, waiting, before_s = kept.n_computed, None, record.begun_s
        while start < turn.n_tokens:
            stop = min(start + self.model.sizes.chunk_tokens, turn.n_tokens)
            done = self._chunk(kept, whole[start:stop], start)
            if waiting is not None:
                before_s = self._finished(kept, record, *waiting, before_s)
            waiting = (done, stop)
            start = stop
        if waiting is not None:
            self._finished(kept, record, *waiting, before_s)

    def _chunk(self, kept: Kept, tokens: torch.Tensor, start: int) -> torch.cuda.Event | None:
        span = self.model.sizes.page_tokens
        device = self.model.device
        if device.type == "cuda":
            tokens = tokens.pin_memory().to(device, non_blocking=True)
        self.model.prefill(tokens, start, kept.kv)
        first, last = start // span, (start + len(tokens)) // span
        kept.prints[first:last] = self.prints.of(kept.words[:, first:last])
        if device.type != "cuda":
            return None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def _finished(
        self,
        kept: Kept,
        record: Computed,
        done: torch.cuda.Event | None,
        n_tokens: int,
        before_s: float,
    ) -> float:
        if done is not None:
            done.synchronize()
        now_s = time.perf_counter()
        record.chunks_s.append(now_s - before_s)
        kept.n_computed = n_tokens
        self.on_pages()
        return now_s
