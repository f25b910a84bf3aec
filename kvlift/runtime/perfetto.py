"""A journal as a trace that ui.perfetto.dev and chrome://tracing open.

A row per request with its phases as slices, counters of each tier's pages and of the work in
flight, and an instant for each report of this rank's ports. Times are the rank's clock
from its first tick. Format: the Trace Event Format of Chrome (JSON object form).
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import attrs
from attrs import define, field

from kvlift.core.agreed import Agreed, Kind
from kvlift.core.counts import device_counts, host_counts
from kvlift.core.ids import Attempt
from kvlift.runtime.journal_lines import GrowLine, IdleLine, TickLine
from kvlift.runtime.journal_read import JournalReader
from kvlift.runtime.replay import Moment, Replayer

REQUESTS, TIERS, RANK = 1, 2, 3
"""Process ids of the trace: its three groups of rows."""

PORTS: Final = {
    "LookupAnswered": "storage",
    "PrefetchProgressed": "storage",
    "PrefetchEnded": "storage",
    "PersistEnded": "storage",
    "RestoreEnded": "copies",
    "MirrorEnded": "copies",
}
"""The row of a report; all others come from the prefill nodes."""

ROWS: Final = {"storage": 1, "copies": 2, "peers": 3}

IN_FLIGHT: Final = {
    Kind.LOOKUP: "lookups",
    Kind.READ: "prefetches",
    Kind.COPY: "restores",
    Kind.MIRROR: "mirrors",
    Kind.PERSIST: "persists",
}

Event = dict[str, Any]


def trace(lines: Iterable[bytes], upto: int | None = None) -> dict[str, object]:
    """The JSON value. Ends at the first difference. Raises `JournalError`."""
    reader = JournalReader.of(lines)
    drawing = Drawing(reader)
    for moment in Replayer(reader).moments(upto):
        if moment.difference is not None:
            break
        drawing.draw(moment)
    return {"traceEvents": drawing.finished(), "displayTimeUnit": "ms"}


@define(eq=False)
class Drawing:
    """`open_by_attempt`: the phase that a request is in, and since when."""

    reader: JournalReader
    events: list[Event] = field(factory=list)
    open_by_attempt: dict[Attempt, tuple[str, float]] = field(factory=dict)
    _start_ns: int | None = None
    _now_us: float = 0.0
    _counted: dict[str, dict[str, int]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        rank = self.reader.header.rank
        for pid, name in ((REQUESTS, "requests"), (TIERS, "tiers"), (RANK, f"rank {rank}")):
            self._name("process_name", pid, 0, name)
        for name, row in ROWS.items():
            self._name("thread_name", RANK, row, f"rank {rank} {name}")

    def draw(self, moment: Moment) -> None:
        line = moment.line
        if moment.after is None or isinstance(line, IdleLine):
            return
        if isinstance(line, TickLine | GrowLine):
            self._note_time(line.now_ns)
        if isinstance(line, TickLine):
            for value in line.reports:
                self._report(moment.tick, next(iter(value)), self.reader.report(value))
        self._phases(moment.tick, moment.after)
        self._counters(moment.after)

    def finished(self) -> list[Event]:
        """All events; what is still open ends with the journal."""
        for attempt in list(self.open_by_attempt):
            self._close(attempt, "")
        return self.events

    def _note_time(self, now_ns: int) -> None:
        if self._start_ns is None:
            self._start_ns = now_ns
        self._now_us = max(self._now_us, (now_ns - self._start_ns) / 1000)

    def _name(self, what: str, pid: int, tid: int, name: str) -> None:
        self.events.append(
            {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
        )

    def _report(self, tick: int, name: str, report: object) -> None:
        fields = attrs.asdict(report)  # type: ignore[arg-type]
        kept = {key: fields[key] for key in ("ticket", "start", "n_pages") if key in fields}
        self.events.append(
            {
                "ph": "i",
                "s": "t",
                "name": name,
                "pid": RANK,
                "tid": ROWS[PORTS.get(name, "peers")],
                "ts": self._now_us,
                "args": {"tick": tick, **kept},
            }
        )

    def _phases(self, tick: int, agreed: Agreed) -> None:
        for attempt in [a for a in self.open_by_attempt if a not in agreed.requests]:
            self._close(attempt, f"gone at tick {tick}")
        for attempt, request in agreed.requests.items():
            phase = type(request.phase).__name__
            known = self.open_by_attempt.get(attempt)
            if known is None:
                name = f"{request.rid[:80]} (attempt {attempt})"
                self._name("thread_name", REQUESTS, attempt, name)
            elif known[0] != phase:
                self._close(attempt, f"{phase} at tick {tick}")
            if known is None or known[0] != phase:
                self.open_by_attempt[attempt] = (phase, self._now_us)

    def _close(self, attempt: Attempt, then: str) -> None:
        phase, since_us = self.open_by_attempt.pop(attempt)
        self.events.append(
            {
                "ph": "X",
                "name": phase,
                "cat": "phase",
                "pid": REQUESTS,
                "tid": attempt,
                "ts": since_us,
                "dur": self._now_us - since_us,
                "args": {"then": then},
            }
        )

    def _counters(self, agreed: Agreed) -> None:
        kinds = Counter(known.kind for known in agreed.tickets.values())
        self._counter("device pages", attrs.asdict(device_counts(agreed)))
        self._counter("host pages", attrs.asdict(host_counts(agreed)))
        self._counter("in flight", {name: kinds[kind] for kind, name in IN_FLIGHT.items()})

    def _counter(self, name: str, values: dict[str, int]) -> None:
        if self._counted.get(name) == values:
            return
        self._counted[name] = values
        self.events.append(
            {"ph": "C", "name": name, "pid": TIERS, "tid": 0, "ts": self._now_us, "args": values}
        )
