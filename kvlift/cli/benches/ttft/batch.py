"""Continuous batching on the decode side, without a host synchronisation inside a step.

A step's launch needs nothing of the step before it: the next token is given. So one step is queued
while the one before it runs, and the device never waits for this thread. On CUDA a step is one
graph; its rows come from a pinned table by one copy.
"""

import time
from collections import deque
from collections.abc import Sequence

import torch
from attrs import define, field, frozen

from kvlift.cli.benches.ttft.model import Model
from kvlift.cli.benches.ttft.workload import Turn
from kvlift.effects.device_memory import LayeredMemory

N_TABLES = 4
"""Pinned tables in turn: more than steps can be queued."""

TOKEN, POSITION, FIRST_PAGE = 0, 1, 2
"""Columns of the table of rows; its pages follow."""


@frozen
class StepTime:
    """One decode step: its time, and the batch that it had."""

    ms: float
    n_rows: int
    n_tokens: int
    """Context of all rows together."""


@define(eq=False)
class Row:
    """A running request. Of its output, `n_queued` tokens are fed and `n_done` steps have ended."""

    turn: Turn
    pages: list[int]
    output: memoryview
    n_queued: int = 0
    n_done: int = 0
    steps: list[int] = field(factory=list)
    """Which of the batch's steps it was in."""

    ended_s: float = 0.0

    @property
    def n_steps(self) -> int:
        """The first token is prefill's, and the last one is fed to nothing."""
        return len(self.output) - 1


@define(eq=False)
class _Flying:
    rows: list[Row]
    n_tokens: int
    begin: torch.cuda.Event | None
    end: torch.cuda.Event | None
    ms: float


class DecodeStep:
    """One token for each of `sizes.batch` rows. Rows without a request write to a page of nobody:
    the last one of `memory`."""

    def __init__(self, model: Model, memory: LayeredMemory) -> None:
        sizes = model.sizes
        self._model = model
        self._memory = memory
        self.scratch_page = memory.n_pages - 1
        self.n_columns = FIRST_PAGE + sizes.n_pages_max
        is_cuda = model.device.type == "cuda"
        shape = (sizes.batch, self.n_columns)
        self.tables = [
            torch.zeros(shape, dtype=torch.int32, pin_memory=is_cuda) for _ in range(N_TABLES)
        ]
        self._rows = torch.zeros(shape, dtype=torch.int32, device=model.device)
        self._rows[:, FIRST_PAGE:] = self.scratch_page
        self._graph: torch.cuda.CUDAGraph | None = None
        self.stream: torch.cuda.Stream | None = None
        if is_cuda:
            self._capture()
            # Before prefill's, where both share a GPU.
            self.stream = torch.cuda.Stream(model.device, priority=-1)  # type: ignore[no-untyped-call]

    def launch(self, table: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream):
            self._rows.copy_(table, non_blocking=True)
            if self._graph is not None:
                self._graph.replay()
            else:
                self._run()

    def _run(self) -> None:
        rows = self._rows
        self.tokens = self._model.decode(
            rows[:, TOKEN].long(), rows[:, POSITION].long(), rows[:, FIRST_PAGE:], self._memory
        )

    def _capture(self) -> None:
        stream = torch.cuda.Stream(self._model.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._run()
        torch.cuda.synchronize(self._model.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        self._graph = graph


class Batch:
    """The running requests. `times` are the steps so far."""

    def __init__(self, step: DecodeStep, n_rows: int) -> None:
        self._step = step
        self._slots: list[Row | None] = [None] * n_rows
        self._flying: deque[_Flying] = deque()
        self._n_launched = 0
        self._master = torch.zeros_like(step.tables[0])
        self._master[:, FIRST_PAGE:] = step.scratch_page
        self.times: list[StepTime] = []

    @property
    def has_room(self) -> bool:
        return None in self._slots

    @property
    def n_flying(self) -> int:
        return len(self._flying)

    def join(self, turn: Turn, pages: Sequence[int]) -> None:
        """Decode this request from its first token on. `pages` hold its prompt and its output."""
        row = Row(turn, list(pages), memoryview(turn.output).cast("i"))
        at = self._slots.index(None)
        self._slots[at] = row
        self._master[at, FIRST_PAGE : FIRST_PAGE + len(pages)] = torch.tensor(
            row.pages, dtype=torch.int32
        )

    def launch(self) -> bool:
        """Queue a step for the rows that need one; False: none does."""
        rows = []
        n_tokens = 0
        for at, row in enumerate(self._slots):
            if row is None or row.n_queued == row.n_steps:
                self._rest(at)
                continue
            position = row.turn.n_tokens + row.n_queued
            self._master[at, TOKEN] = row.output[row.n_queued]
            self._master[at, POSITION] = position
            row.n_queued += 1
            row.steps.append(self._n_launched)
            rows.append(row)
            n_tokens += position + 1
        if not rows:
            return False
        table = self._step.tables[self._n_launched % N_TABLES]
        table.copy_(self._master)
        self._n_launched += 1
        self._flying.append(self._timed(table, rows, n_tokens))
        return True

    def land(self) -> list[Row]:
        """Wait for the oldest step; the requests that have ended with it."""
        step = self._flying.popleft()
        ms = step.ms
        if step.begin is not None and step.end is not None:
            step.end.synchronize()
            ms = float(step.begin.elapsed_time(step.end))
        self.times.append(StepTime(ms, len(step.rows), step.n_tokens))
        ended = []
        for row in step.rows:
            row.n_done += 1
            if row.n_done == row.n_steps:
                row.ended_s = time.perf_counter()
                self._slots[self._slots.index(row)] = None
                ended.append(row)
        return ended

    def _rest(self, at: int) -> None:
        """A row of nobody: one token of context, on a page of nobody."""
        self._master[at, TOKEN] = 0
        self._master[at, POSITION] = 0
        self._master[at, FIRST_PAGE:] = self._step.scratch_page

    def _timed(self, table: torch.Tensor, rows: list[Row], n_tokens: int) -> _Flying:
        if self._step.stream is None:
            begin_s = time.perf_counter()
            self._step.launch(table)
            return _Flying(rows, n_tokens, None, None, (time.perf_counter() - begin_s) * 1e3)
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        begin.record(self._step.stream)
        self._step.launch(table)
        end.record(self._step.stream)
        return _Flying(rows, n_tokens, begin, end, 0.0)
