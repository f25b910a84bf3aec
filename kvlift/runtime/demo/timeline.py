"""One request's life, read from the journal of rank 0."""

from pathlib import Path
from typing import Any, Final

import msgspec
from attrs import define, field, frozen

from kvlift.runtime.journal_lines import EffectRow, Line, TickLine

LINE_BYTES_MAX: Final = 64 << 20

ROWS: Final = {
    "StartLookup": "storage: look up",
    "StartPrefetch": "storage → host",
    "StartRestore": "host → device",
    "SendWant": "peer → device",
}
REPORTS: Final = {
    "LookupAnswered", "PrefetchProgressed", "PrefetchEnded", "RestoreEnded", "PagesArrived",
}  # fmt: skip


@frozen
class Bar:
    """Something that took time; in ms from the submission. `n_pages` have come by the end."""

    row: str
    start_ms: float
    stop_ms: float
    n_pages: int


@frozen
class Timeline:
    """`first_token_ms`: when the first token was here; `ready_ms`: when everything was."""

    rid: str
    bars: tuple[Bar, ...]
    first_token_ms: float | None
    ready_ms: float | None


@define
class _Life:
    """What is known of the request so far. Times in ms of the journal's clock."""

    rid: str
    attempt: int | None = None
    peer: int | None = None
    submitted_ms: float | None = None
    promised_ms: float | None = None
    token_ms: float | None = None
    ready_ms: float | None = None
    ended_ms: float | None = None
    starts: dict[int, tuple[str, float]] = field(factory=dict)
    stops: dict[int, tuple[float, int]] = field(factory=dict)
    came: dict[int, float] = field(factory=dict)
    restore_of_read: dict[int, int] = field(factory=dict)

    def hear(self, line: TickLine) -> None:
        now_ms = line.now_ns / 1e6
        for call in line.calls:
            for kind, fields in call.items():
                if kind == "Submit" and fields["rid"] == self.rid:
                    self.submitted_ms = now_ms
        if self.submitted_ms is None:
            return
        for notice in line.decided.notices:
            for kind, fields in notice.items():
                if fields.get("rid") == self.rid:
                    self._note(kind, fields, now_ms)
        for effect in line.decided.effects:
            self._start(effect, now_ms)
        for report in line.reports:
            for kind, fields in report.items():
                self._report(kind, fields, now_ms)

    def _note(self, kind: str, fields: dict[str, Any], now_ms: float) -> None:
        match kind:
            case "WasPromised":
                self.attempt, self.promised_ms = fields["attempt"], now_ms
            case "BecameReady":
                self.ready_ms = now_ms
            case "HasEnded":
                self.ended_ms = now_ms
            case _:
                pass

    def _start(self, effect: EffectRow, now_ms: float) -> None:
        # Whose the first lookups are is known only later: all are kept, sorted out in the end.
        if effect.what in ROWS and effect.ticket not in self.starts:
            self.starts[effect.ticket] = (f"{effect.owner}/{ROWS[effect.what]}", now_ms)
            if effect.what == "StartPrefetch":
                self.restore_of_read[effect.second] = effect.ticket
                self.starts[effect.second] = (f"{effect.owner}/{ROWS['StartRestore']}", now_ms)
        if effect.what == "SendWant" and effect.owner == self.attempt:
            self.peer = effect.ticket

    def _report(self, kind: str, fields: dict[str, Any], now_ms: float) -> None:
        ticket = fields["ticket"]
        if kind in REPORTS:
            self.came.setdefault(ticket, now_ms)
            n_pages = fields.get("start", 0) + fields["n_pages"]
            if n_pages >= self.stops.get(ticket, (0.0, 0))[1]:
                self.stops[ticket] = (now_ms, n_pages)
        elif kind == "TokenArrived" and ticket == self.peer:
            self.token_ms = now_ms

    def told(self) -> Timeline | None:
        if self.submitted_ms is None or self.promised_ms is None or self.attempt is None:
            return None
        zero = self.submitted_ms
        bars = [Bar("wait for admission", 0.0, self.promised_ms - zero, 0)]
        for ticket, (owned, start_ms) in self.starts.items():
            owner, _, row = owned.partition("/")
            if owner != str(self.attempt) or ticket not in self.stops:
                continue
            stop_ms, n_pages = self.stops[ticket]
            read = self.restore_of_read.get(ticket)
            if read is not None and read in self.came:
                start_ms = self.came[read]  # a restore follows its read, from the first pages on
            bars.append(Bar(row, start_ms - zero, max(stop_ms, start_ms) - zero, n_pages))
        if self.ready_ms is not None and self.ended_ms is not None:
            bars.append(Bar("decode", self.ready_ms - zero, self.ended_ms - zero, 0))
        return Timeline(
            rid=self.rid,
            bars=tuple(bars),
            first_token_ms=None if self.token_ms is None else self.token_ms - zero,
            ready_ms=None if self.ready_ms is None else self.ready_ms - zero,
        )


def timeline_of(journal: Path, rid: str) -> Timeline | None:
    """None where the journal has nothing to tell of this request."""
    life = _Life(rid)
    decoder = msgspec.json.Decoder(Line)
    try:
        with journal.open("rb") as opened:
            while raw := opened.readline(LINE_BYTES_MAX):
                line = decoder.decode(raw)
                if isinstance(line, TickLine):
                    life.hear(line)
    except (OSError, msgspec.DecodeError):
        # The drawing is an extra: a journal cut short by a full disk fails no run.
        return life.told()
    return life.told()
