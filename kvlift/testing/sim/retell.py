"""A recorded run acted again on a story's stage, line by line; the lines that were played are it.

What a story decides by itself (look-ups answer at once, a first token comes with the last page) may
come a few ticks earlier there. So a call of the host waits until its request is ready for it, and
reads, copies, writes and messages take as many ticks, and bring as many pages, as those of the
recorded run that were for the same thing (`retell_landings`).
"""

import re
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Final

from attrs import define, field

from kvlift.core.submission import (
    Abort,
    AttachStorage,
    DetachStorage,
    Finish,
    Flush,
    Resume,
    Retract,
    Run,
    Submission,
    Submit,
)
from kvlift.core.tier import Tier
from kvlift.testing.sim.cast import Cast
from kvlift.testing.sim.retell_landings import Behind
from kvlift.testing.sim.scribe import Entry, Scribe
from kvlift.testing.story_check import words_of as states_of
from kvlift.testing.story_land import NothingThereError
from kvlift.testing.story_lines import Line
from kvlift.testing.story_parse import VERBS
from kvlift.testing.story_play import Player
from kvlift.testing.story_stage import Stage, StoryFailedError
from kvlift.testing.story_words import StoryError, words_of

NS_PER_US = 1000


class Found(Exception):
    """The stage objects: what is wrong, in the words of a story's verdict."""


CHECKERS: Final = {
    "not conserved|counts -?\\d+ pages|physical pages|negative count": "conservation",
    "is free|is written while|is page \\d+ and page": "conservation",
    "second effect|open again|reductions? in one tick": "conservation",
    "do not hold what|begins with token|wrong bytes": "bytes",
    "belongs to": "isolation",
    "diverged|rank \\d+ reports|one answer of all ranks|equal answers": "agreement",
    "no error of kvlift|no fault of a rank": "calls",
}


def checker_of(message: str) -> str | None:
    """The checker of a simulation that would say the same; None: a line asks for what can't be."""
    return next((name for words, name in CHECKERS.items() if re.search(words, message)), None)


def carried_out(stage: Stage, text: str) -> None:
    """One more line.

    Raises `Found` where kvlift is wrong, `NothingThereError` or `StoryError` where the line is."""
    words = words_of(1, text)
    verb = words.next_word("statement")
    statement = VERBS[verb](verb, words)
    try:
        Player(stage).play(Line(1, text, statement))
    except StoryFailedError as failed:
        raise Found(str(failed)) from failed
    except (NothingThereError, StoryError):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise Found(f"expected no error of kvlift, found {what}") from error
    if stage.diverged is not None:
        raise Found(f"the ranks diverged: {stage.diverged}")


Asked = Submission | int
"""A call of the host, or the pages by which a request shall grow."""


@define(eq=False)
class Retelling:
    """`told`: the lines so far. `scribes`: of the recorded run, one a rank."""

    stage: Stage
    scribes: Sequence[Scribe]
    cast: Cast
    told: list[str] = field(factory=list)
    n_ticks: int = 0
    behind: Behind = field(init=False)
    _entries: dict[int, Entry] = field(init=False)
    _calls: "dict[str, deque[tuple[int, Asked]]]" = field(init=False)
    _room: tuple[int, int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        world, first = self.stage.world, self.scribes[0]
        self._room = (world.n_device_pages, world.n_host_pages)
        self.behind = Behind(self.stage, self.scribes, self.tell)
        self._entries = {entry.tick: entry for entry in first.entries}
        calls: dict[str, list[tuple[int, Asked]]] = defaultdict(list)
        for entry in first.entries:
            for call in entry.calls:
                if (rid := getattr(call, "rid", None)) is not None:
                    calls[rid].append((entry.tick, call))
        for tick, rid, n_pages in first.grown:
            calls[rid].append((tick + 1, n_pages))
        self._calls = {rid: deque(sorted(some, key=_when)) for rid, some in calls.items()}

    @property
    def n_ticks_recorded(self) -> int:
        return max(self._entries, default=0)

    def tell(self, text: str) -> bool:
        """Play a line and keep it; one that has nothing to act on is left out."""
        try:
            carried_out(self.stage, text)
        except (NothingThereError, StoryError):
            return False
        except Found as found:
            if checker_of(str(found)) is None:
                return False  # a call that is not possible here
            self.told.append(text)
            raise
        self.told.append(text)
        return True

    def expect(self, text: str) -> None:
        """Raises `Found` where it does not hold; only then it is a part of the story."""
        try:
            carried_out(self.stage, text)
        except Found:
            self.told.append(text)
            raise

    def tick(self) -> None:
        """One recorded tick: what comes before it, itself, and what lands behind it."""
        self.n_ticks += 1
        self._host(self.n_ticks)
        self._set_aside(self.n_ticks)
        self.behind.answer_lookups()
        self.tell("tick")
        self.behind.look(self.n_ticks)
        self._pass_time(self.n_ticks)

    def _host(self, tick: int) -> None:
        entry = self._entries.get(tick)
        for call in () if entry is None else entry.calls:
            match call:
                case Flush(tier=tier):
                    self.tell(f"flush {'all' if tier is Tier.STORAGE else tier.value}")
                case DetachStorage():
                    self.tell("detach storage")
                case AttachStorage():
                    self.tell("attach storage")
                case _:
                    pass
        for rid, calls in self._calls.items():
            while calls and calls[0][0] <= tick and self._can_be_told(rid, calls[0][1]):
                calls.popleft()

    def _can_be_told(self, rid: str, call: Asked) -> bool:
        """False: not yet. A call whose request has gone another way here is left out."""
        request = self.stage.requests.by_name.get(rid)
        is_alive = request is not None and request.outcome is None
        if isinstance(call, Submit):
            if is_alive:
                return False
            output = f" output={call.n_pages_output}" if call.n_pages_output else ""
            priority = f" priority={call.priority}" if call.priority else ""
            self.tell(f"submit {rid}{priority}{output}")
            return True
        if not is_alive:
            return True
        if isinstance(call, Abort):
            self.tell(f"abort {rid}")
            return True
        line, needed = self._line_of(rid, call)
        if needed not in states_of(self.stage, rid, 0):
            return False
        self.tell(line())
        return True

    def _line_of(self, rid: str, call: Asked) -> tuple[Callable[[], str], str]:
        """How it is said, and the state that it needs."""
        match call:
            case Run():
                return lambda: f"run {rid}", "ready"
            case Finish(output=output):
                return lambda: f"finish {rid}{self._n_output(rid, output)}", "running"
            case Retract():
                return lambda: f"retract {rid}", "running"
            case Resume():
                return lambda: f"resume {rid}", "retracted"
            case _:
                return lambda: f"grow {rid} {call}", "running"

    def _n_output(self, rid: str, output: bytes) -> str:
        """Full pages behind the prompt's, as far as the request has places for them."""
        prompt = self.cast.actors[rid].prompt
        n_full = (prompt.n_tokens + len(output) // 4 - 1) // prompt.page_tokens
        tables = self.stage.requests.by_name[rid].tables
        n_pages = min(n_full, *(len(table) for table in tables)) - prompt.n_pages_full
        return f" output={n_pages}" if n_pages > 0 else ""

    def _set_aside(self, tick: int) -> None:
        """The room that the ballot of this tick tells stands in the verdict of the next one."""
        entry = self._entries.get(tick + 1)
        if entry is None or entry.room is None:
            return
        world = self.stage.world
        for name, room, before, n_all in (
            ("device", entry.room[0], self._room[0], world.n_device_pages),
            ("host", entry.room[1], self._room[1], world.n_host_pages),
        ):
            if room != before:
                n_aside = n_all - room
                self.tell(f"wedge {name} {n_aside}" if n_aside else f"unwedge {name}")
        self._room = entry.room

    def _pass_time(self, tick: int) -> None:
        here, there = self._entries.get(tick), self._entries.get(tick + 1)
        if here is None or there is None:
            return
        n_us = (there.now_ns - here.now_ns) // NS_PER_US
        if n_us > 0:
            self.tell(f"advance {n_us // 1000}ms" if n_us % 1000 == 0 else f"advance {n_us}us")


def _when(call: tuple[int, Asked]) -> int:
    return call[0]
