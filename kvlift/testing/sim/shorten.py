"""Taking out of a story what it does not need, while it shows the same."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from attrs import define, field

RANK_0: Final = " rank=0"
RANK: Final = re.compile(r" rank=\d+$")
TICKS: Final = re.compile(r"tick(?: (\d+))?")
NAME: Final = re.compile(r"[A-Za-z_][\w.-]*")
KEPT: Final = ("ports auto", "unwedge device", "unwedge host", "attach storage")
"""A story's end: without these, what is expected then could not happen with a right core either."""


@define(eq=False)
class Shortener:
    """`lines` get fewer while they still show what they did, which `shows` knows.

    The first line (the world) and the last one (what fails) stay."""

    lines: list[str]
    shows: Callable[[Sequence[str]], bool]
    seconds_max: float
    clock: Callable[[], float] = time.monotonic
    _end_s: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._end_s = self.clock() + self.seconds_max

    def shorten(self) -> list[str]:
        self._on_all_ranks()
        self._without_requests()
        self._without_chunks()
        self._on_all_ranks()
        self._without_chunks()
        self._try(_ticks_together(self.lines))
        return self.lines

    def _try(self, candidate: Sequence[str]) -> bool:
        if self.clock() >= self._end_s or not self.shows(candidate):
            return False
        self.lines = list(candidate)
        return True

    def _on_all_ranks(self) -> None:
        """A line for rank 0 on all ranks, without the others of its kind before the next tick."""
        place = 0
        while place < len(self.lines) - 1:
            line, rest = self.lines[place], self.lines[place + 1 :]
            if line.endswith(RANK_0):
                said = line.removesuffix(RANK_0)
                stop = next((at for at, other in enumerate(rest) if TICKS.match(other)), len(rest))
                behind = [other for other in rest[:stop] if RANK.sub("", other) != said]
                self._try([*self.lines[:place], said, *behind, *rest[stop:]])
            place += 1

    def _without_requests(self) -> None:
        """Without all that is said of one request, its prompt too if nobody needs it."""
        names = [line.split()[1] for line in self.lines if line.startswith("submit ")]
        for name in reversed(dict.fromkeys(names)):
            kept = [x for x in self.lines if x.startswith("prompt ") or name not in NAME.findall(x)]
            if kept[-1] == self.lines[-1]:
                self._try(list(_needed(kept)))

    def _without_chunks(self) -> None:
        """Without some lines that follow each other, many at first."""
        size = max(1, (len(self.lines) - 2) // 2)
        while size > 0:
            start = len(self.lines) - 1 - size
            while start > 0:
                chunk = self.lines[start : start + size]
                pinned = [line for line in chunk if line in KEPT]
                if len(pinned) < len(chunk):
                    kept = [*self.lines[:start], *pinned, *self.lines[start + size :]]
                    self._try(list(_needed(kept)))
                start = min(start - size, len(self.lines) - 1 - size)
            size //= 2


def _needed(lines: Sequence[str]) -> Iterator[str]:
    """Without prompts that no other line names."""
    named = {name for x in lines if not x.startswith("prompt ") for name in NAME.findall(x)}
    kept = []
    for line in reversed(lines):
        if line.startswith("prompt "):
            words = line.split()
            if words[1] not in named:
                continue
            parents = [word[5:] for word in words if word.startswith(("from=", "like="))]
            named |= {parent.partition("[")[0] for parent in parents}
        kept.append(line)
    yield from reversed(kept)


def _ticks_together(lines: Sequence[str]) -> list[str]:
    """Ticks that follow each other in one line, but for the last line, which is what fails."""
    made: list[str] = []
    for line in lines[:-1]:
        found = TICKS.fullmatch(line)
        before = TICKS.fullmatch(made[-1]) if made else None
        if found is not None and before is not None:
            made[-1] = f"tick {int(before[1] or 1) + int(found[1] or 1)}"
        else:
            made.append(line)
    return [*made, lines[-1]]
