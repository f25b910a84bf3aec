"""Which rank is late: known from a heartbeat of its own, because a reduction cannot say.

Each rank writes a line into the rendezvous store, which lives with the launcher, and reads the
lines of the others:

    n_beats  n_sent  standing  blamed

`n_beats` grows as long as the process is scheduled at all, so a rank under SIGSTOP is silent.
`n_sent` counts its ballots, so a rank whose host loop is stuck is behind although it beats.
`standing` is `here`, `left` after an orderly close, or `late`/`lost` when this rank has given the
group up; `blamed` lists because of whom ("-": nobody known).
"""

import threading
import time
from enum import Enum

import torch.distributed as dist
from attrs import define, field, frozen

from kvlift.effects.patience import LATE_MAX_S, Pauses

LINE_BYTES_MAX = 16384

OUT_OF_REACH_S = 2.0
"""Between two beats while the store does not answer: torch logs a page for each that fails."""


class Standing(Enum):
    HERE = "here"
    LEFT = "left"
    LATE = "late"
    LOST = "lost"


@frozen
class Line:
    """What one rank says about itself."""

    n_beats: int = 0
    n_sent: int = 0
    standing: Standing = Standing.HERE
    blamed: tuple[int, ...] = ()

    def to_text(self) -> str:
        blamed = ",".join(str(rank) for rank in self.blamed) or "-"
        return f"{self.n_beats} {self.n_sent} {self.standing.value} {blamed}"

    @classmethod
    def parse(cls, data: bytes) -> "Line":
        """Raises ValueError for anything that `to_text` does not write."""
        if len(data) > LINE_BYTES_MAX:
            raise ValueError("a heartbeat line is longer than any rank writes")
        n_beats, n_sent, standing, blamed = data.decode().split(" ")
        names = () if blamed == "-" else tuple(int(name) for name in blamed.split(","))
        return cls(int(n_beats), int(n_sent), Standing(standing), names)


@define(eq=False)
class Heartbeat:
    """One thread that beats for this rank and watches the others.

    Ages are measured on this rank's clock between rounds of its own watching, without the time in
    which it stood still, so that a rank that goes on does not take those for silent that still do.
    """

    rank: int
    n_ranks: int
    store: dist.Store
    period_s: float
    _line: Line = field(factory=Line, init=False)
    _lines: dict[int, Line] = field(factory=dict, init=False)
    _changed_at_s: dict[int, float] = field(factory=dict, init=False)
    _round_at_s: float = field(default=0.0, init=False)
    is_calm: bool = field(default=True, init=False)
    """Nobody has left or given up, as far as this rank has heard. Read without the lock."""
    _pauses: Pauses = field(init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)
    _wake: threading.Event = field(factory=threading.Event, init=False)
    _ended: threading.Event = field(factory=threading.Event, init=False)
    _thread: threading.Thread = field(init=False)

    def start(self) -> None:
        """Every rank has written its first line before any rank reads (see `announce`)."""
        now_s = time.monotonic()
        others = [rank for rank in range(self.n_ranks) if rank != self.rank]
        self._changed_at_s = dict.fromkeys(others, now_s)
        self._lines = {rank: Line() for rank in others}
        self._round_at_s = now_s
        self._pauses = Pauses(max(4 * self.period_s, LATE_MAX_S))
        name = f"kvlift-heartbeat-{self.rank}"
        self._thread = threading.Thread(target=self._beat_until_ended, name=name, daemon=True)
        self._thread.start()

    def announce(self) -> None:
        """Write this rank's first line."""
        self.store.set(_key(self.rank), self._line.to_text())

    def count_sent(self) -> None:
        """One more ballot of this rank is on its way; told to the others with the next beat."""
        with self._lock:
            line = self._line
            self._line = Line(line.n_beats, line.n_sent + 1, line.standing, line.blamed)

    def give_up(self, standing: Standing, blamed: tuple[int, ...]) -> None:
        """Tell the others at once that this rank has given the group up, and why."""
        self._stand(standing, blamed)
        self._wake.set()

    def stop(self, timeout_s: float) -> bool:
        """Last line, then the thread ends. False if the store did not answer in time."""
        with self._lock:
            standing, blamed = self._line.standing, self._line.blamed
        if standing is Standing.HERE:
            self._stand(Standing.LEFT, blamed)
        self._ended.set()
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def lines(self) -> dict[int, Line]:
        """The last line heard of each other rank."""
        with self._lock:
            return dict(self._lines)

    def silent_ranks(self, silence_s: float) -> tuple[int, ...]:
        """Ranks that have not beaten for so long. Nobody, if this rank itself cannot hear."""
        with self._lock:
            if self._is_deaf(silence_s):
                return ()
            ages = {rank: self._round_at_s - at_s for rank, at_s in self._changed_at_s.items()}
        return tuple(rank for rank, age_s in sorted(ages.items()) if age_s > silence_s)

    def behind_ranks(self, silence_s: float) -> tuple[int, ...]:
        """Ranks that have sent fewer ballots than this one. Nobody, if this rank cannot hear: by
        what it has heard last, everybody stands still."""
        with self._lock:
            if self._is_deaf(silence_s):
                return ()
            n_sent = self._line.n_sent
            return tuple(r for r, line in sorted(self._lines.items()) if line.n_sent < n_sent)

    def _is_deaf(self, silence_s: float) -> bool:
        return time.monotonic() - self._round_at_s > silence_s

    def _stand(self, standing: Standing, blamed: tuple[int, ...]) -> None:
        with self._lock:
            line = self._line
            self._line = Line(line.n_beats, line.n_sent, standing, blamed)

    def _beat_until_ended(self) -> None:
        while True:
            ended, pause_s = self._ended.is_set(), self.period_s
            try:
                self._beat()
                if ended:
                    return
                self._watch()
            except RuntimeError:
                # The store is unreachable (DistNetworkError and its kin are RuntimeErrors). Rounds
                # stop, so `silent_ranks` names nobody; the reduction's own deadline still holds.
                if ended:
                    return
                pause_s = OUT_OF_REACH_S
            self._wake.wait(pause_s)
            self._wake.clear()

    def _beat(self) -> None:
        with self._lock:
            line = self._line
            line = self._line = Line(line.n_beats + 1, line.n_sent, line.standing, line.blamed)
        self.store.set(_key(self.rank), line.to_text())

    def _watch(self) -> None:
        others = sorted(self._changed_at_s)
        heard = self.store.multi_get([_key(rank) for rank in others])
        now_s = time.monotonic()
        slept_s = self._pauses.slept_s(now_s)
        with self._lock:
            for rank, data in zip(others, heard, strict=True):
                try:
                    line = Line.parse(bytes(data))
                except ValueError:
                    continue  # no line of a rank: that one has not beaten, and this thread goes on
                is_heard = line.n_beats != self._lines[rank].n_beats
                self._changed_at_s[rank] = now_s if is_heard else self._changed_at_s[rank] + slept_s
                self._lines[rank] = line
            self._round_at_s = now_s
            self.is_calm = all(line.standing is Standing.HERE for line in self._lines.values())


def _key(rank: int) -> str:
    return f"beat/{rank}"
