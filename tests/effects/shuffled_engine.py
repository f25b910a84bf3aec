"""A GPU made of CPU memory whose lanes run in any order that streams and events allow.

What a real device does by timing, this does by a seeded choice: a missing wait between two lanes
shows as wrong bytes under some seed.
"""

import contextlib
import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from attrs import define, field

from kvlift.effects.copies_driver import Rows, Span
from kvlift.effects.copies_engine import Event, Lane
from kvlift.effects.copies_scatter import SliceMover
from kvlift.effects.device_memory import LayeredMemory, PagedMemory


@define(eq=False)
class ShuffledEvent:
    engine: "ShuffledEngine"
    has_passed: bool = False

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        while not self.has_passed:
            self.engine.run(1)


@define(eq=False)
class ShuffledEngine:
    memory: PagedMemory
    seed: int = 0
    fail_at: int | None = None
    n_calls: int = 0
    n_spans: int = 0
    n_moves: int = 0
    scattered: list[int] = field(factory=list)
    batches: list[int] = field(factory=list)
    lanes: dict[Lane, deque[Callable[[], bool]]] = field(init=False)
    rng: random.Random = field(init=False)
    slow: Lane = field(init=False)
    mover: SliceMover | None = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.lanes = {lane: deque() for lane in Lane}
        self.rng = random.Random(self.seed)
        self.slow = self.rng.choice(list(Lane))
        self.mover = (
            SliceMover(self.memory, n_programs=2)
            if isinstance(self.memory, LayeredMemory)
            else None
        )

    def run(self, n_steps: int | None = None) -> None:
        """So many steps, or all there are; each is one lane's next work that is not waiting."""
        while n_steps is None or n_steps > 0:
            lanes = [lane for lane in Lane if self.lanes[lane]]
            self.rng.shuffle(lanes)
            if self.slow in lanes and self.rng.random() < 0.95:
                # Mostly last: what does not wait for this lane is far ahead of it.
                lanes.append(lanes.pop(lanes.index(self.slow)))
            for lane in lanes:
                if self.lanes[lane][0]():
                    self.lanes[lane].popleft()
                    break
            else:
                assert not lanes, "the lanes wait for each other"
                return
            if n_steps is not None:
                n_steps -= 1

    def ring(self, n_slots: int) -> torch.Tensor:
        return torch.randint(0, 256, (n_slots, self.memory.page_bytes), dtype=torch.uint8)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        yield

    def copy(self, lane: Lane, spans: Sequence[Span]) -> None:
        self._called()
        self.n_spans += len(spans)
        for span in self.rng.sample(list(spans), len(spans)):
            self._put(lane, partial(ctypes.memmove, *span))

    def copy_rows(
        self, lane: Lane, rows: Rows, targets: Sequence[int], sources: Sequence[int]
    ) -> None:
        self._called()
        self.batches.append(len(targets))
        moves = list(zip(targets, sources, strict=True))
        for target, source in self.rng.sample(moves, len(moves)):
            for i in range(rows.n_rows):
                row_target = target + i * rows.target_pitch
                row_source = source + i * rows.source_pitch
                self._put(lane, partial(ctypes.memmove, row_target, row_source, rows.width))

    def upload(self, lane: Lane, pages: Sequence[int]) -> torch.Tensor:
        values = torch.tensor(pages, dtype=torch.int64)
        on_device = torch.zeros_like(values)
        self._put(lane, lambda: on_device.copy_(values))
        return on_device

    def scatter(
        self, lane: Lane, ring: torch.Tensor, slot: int, pages: torch.Tensor, first: int, n: int
    ) -> None:
        self._called()
        assert self.mover is not None
        mover = self.mover
        self.n_moves += 1
        self.scattered.append(n)
        self._put(lane, lambda: mover.scatter(ring, slot, pages, first, n))

    def gather(
        self, lane: Lane, ring: torch.Tensor, slot: int, pages: torch.Tensor, first: int, n: int
    ) -> None:
        self._called()
        assert self.mover is not None
        mover = self.mover
        self.n_moves += 1
        self._put(lane, lambda: mover.gather(ring, slot, pages, first, n))

    def record(self, lane: Lane) -> Event:
        event = ShuffledEvent(self)
        self._put(lane, lambda: setattr(event, "has_passed", True))
        return event

    def wait(self, lane: Lane, event: Event) -> None:
        self.lanes[lane].append(event.query)

    def wait_for_compute(self, lane: Lane) -> None:
        pass

    def _put(self, lane: Lane, work: Callable[[], object]) -> None:
        def run() -> bool:
            work()
            return True

        self.lanes[lane].append(run)

    def _called(self) -> None:
        self.n_calls += 1
        if self.n_calls == self.fail_at:
            raise RuntimeError("the simulated device refuses")
