"""The journal: an observer that writes down everything the core decided from, and what it decided.

`kvlift replay` sends it through the core again, `kvlift explain` tells one request's life from it.
A ring keeps the last ticks in memory until somebody asks for them; a file gets everything.
"""

import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import attrs
from attrs import define, field
from msgspec.structs import replace

from kvlift.core.advance import Decision, State
from kvlift.core.landed import Landed
from kvlift.core.submission import Finish, Retract, Submission, Submit
from kvlift.runtime.config import Config
from kvlift.runtime.journal_file import LOG, dump
from kvlift.runtime.journal_lines import (
    FORMAT,
    AdoptLine,
    ConfigLine,
    FaultLine,
    GrowLine,
    Header,
    IdleLine,
    Line,
    RaisedLine,
    TickLine,
    decided_of,
    named,
    without_zeros,
)
from kvlift.runtime.observer import Adoption, Round, SilentObserver

RING_BYTES_MAX: Final = 256 << 20
"""Tokens that a ring keeps alive at most; it forgets earlier ticks for later ones."""

FAULT_CHARACTERS_MAX: Final = 500

LAST_WORDS_S: Final = 1.0
"""How long a tick that raises waits for its line to be written."""


class Sink(Protocol):
    """Where lines go."""

    def put(self, line: Line, n_bytes: int) -> None: ...

    def flush(self, deadline_s: float) -> None:
        """Wait up to so long for what was put to be safe."""

    def close(self) -> None: ...


@define(eq=False)
class Ring:
    """The last `n_lines_max` lines. A run of idle ticks is one line."""

    n_lines_max: int
    n_lost: int = field(default=0, init=False)
    _n_bytes: int = field(default=0, init=False)
    _lines: deque[tuple[Line, int]] = field(factory=deque, init=False)

    def put(self, line: Line, n_bytes: int) -> None:
        self._lines.append((line, n_bytes))
        self._n_bytes += n_bytes
        while len(self._lines) > self.n_lines_max or self._n_bytes > RING_BYTES_MAX:
            _line, n_bytes = self._lines.popleft()
            self._n_bytes -= n_bytes
            self.n_lost += 1

    def lines(self) -> list[Line]:
        return [line for line, _n_bytes in self._lines]

    def flush(self, deadline_s: float) -> None:
        """A ring is as safe as its process."""

    def close(self) -> None:
        """Nothing to give back."""


def fields_of(config: Config) -> dict[str, int | str]:
    """Plain values, as `Config.parse` takes them."""
    return {
        name: value if isinstance(value, int | str) else value.value
        for name, value in attrs.asdict(config).items()
    }


def header_of(
    config: Config,
    *,
    has_storage: bool,
    rank: int,
    n_ranks: int,
    begun_ns: int = 0,
    is_hosted: bool = False,
) -> Header:
    return Header(
        format=FORMAT,
        config=fields_of(config),
        has_storage=has_storage,
        rank=rank,
        n_ranks=n_ranks,
        begun_ns=begun_ns,
        is_hosted=is_hosted,
    )


def path_of_rank(path: Path, rank: int, n_ranks: int) -> Path:
    """Ranks share a config, not a file: `run.ndjson` becomes `run.rank1.ndjson`."""
    if n_ranks == 1:
        return path
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def n_bytes_kept(call: Submission) -> int:
    """About what a call keeps alive while it waits to be written."""
    match call:
        case Submit(prompt=prompt):
            return len(prompt.tokens)
        case Finish(output=output) | Retract(output=output):
            return len(output)
        case _:
            return 0


class Journal(SilentObserver):
    """`path`: where a ring is written when the driver closes; None: only when asked for."""

    def __init__(self, header: Header, sink: Sink, path: Path | None = None) -> None:
        self.header = header
        self._sink = sink
        self._path = path
        self._n_idle = 0
        self._lock = threading.Lock()  # `dump` may come from another thread than the tick

    def ticked(
        self,
        state: State,
        now_ns: int,
        reports: Sequence[Landed],
        least: tuple[int, ...] | None,
        calls: Sequence[Submission],
        decision: Decision,
    ) -> None:
        agreed = state.agreed
        happened = least is not None or calls or reports or decision.effects or decision.notices
        if not happened and not decision.arrows:
            with self._lock:
                self._n_idle += 1
            return
        line = TickLine(
            tick=agreed.tick,
            now_ns=now_ns,
            decided=decided_of(decision, agreed),
            least=None if least is None else without_zeros(least),
            calls=named(calls),
            reports=named(reports),
        )
        self._put(line, 8 * len(line.least or ()) + sum(map(n_bytes_kept, calls)))

    def grew(self, state: State, rid: str, n_pages: int, decision: Decision, now_ns: int) -> None:
        decided = decided_of(decision, state.agreed)
        self._put(GrowLine(now_ns=now_ns, rid=rid, n_pages=n_pages, decided=decided), 0)

    def adopted(self, state: State, what: Adoption, decision: Decision, now_ns: int) -> None:
        line = AdoptLine(
            now_ns=now_ns,
            tier=what.tier.value,
            prompt=what.prompt,
            start=what.start,
            stop=what.stop,
            decided=decided_of(decision, state.agreed),
            is_stow=what.is_stow,
        )
        self._put(line, len(what.prompt.tokens))

    def reconfigured(self, config: Config) -> None:
        self._put(ConfigLine(config=fields_of(config)), 0)

    def failed(self, effect: object, error: Exception) -> None:
        words = f"{type(error).__name__}: {error}"[:FAULT_CHARACTERS_MAX]
        self._put(FaultLine(effect=type(effect).__name__, error=words), 0)

    def raised(self, state: State, done: Round, error: Exception) -> None:
        """Often the last word of a process, so it waits for the disk as no other line does."""
        is_decided = done.during == "telling"
        line = RaisedLine(
            tick=state.agreed.tick + (not is_decided),
            now_ns=done.now_ns,
            during=done.during,
            error=type(error).__name__,
            words=str(error)[:FAULT_CHARACTERS_MAX],
            least=None if is_decided or done.least is None else without_zeros(done.least),
            calls=() if is_decided else named(done.calls),
            reports=() if is_decided else named(done.reports),
        )
        self._put(line, sum(map(n_bytes_kept, done.calls)))
        self._sink.flush(LAST_WORDS_S)

    def close(self) -> None:
        with self._lock:
            self._note_idle_ticks()
            self._sink.close()
        if not isinstance(self._sink, Ring) or self._path is None:
            return
        try:
            self.dump(self._path)
        except OSError as error:  # weather, as for a file that is written all along
            LOG.error("the journal %s could not be written: %s", self._path, error)

    def dump(self, path: Path) -> None:
        """Write what a ring holds to a file of its own. From any thread. Raises `OSError`."""
        with self._lock:
            self._note_idle_ticks()
            if not isinstance(self._sink, Ring):
                raise TypeError("only a ring can be dumped: a file has everything already")
            header = replace(self.header, n_lost=self._sink.n_lost)
            lines = self._sink.lines()
        dump(path, [header, *lines], n_files_max=int(header.config["journal_files_max"]))

    def _put(self, line: Line, n_bytes: int) -> None:
        with self._lock:
            self._note_idle_ticks()
            self._sink.put(line, n_bytes)

    def _note_idle_ticks(self) -> None:
        if self._n_idle:
            self._sink.put(IdleLine(n=self._n_idle), 0)
            self._n_idle = 0
