"""The driver's log: standard `logging`, one line an occasion, each with tick, request and attempt.

Tokens, keys and secrets are never in it. What came from outside (request names, the words of a
prefill node) is escaped and cut, so that it can't forge lines. Logger: `kvlift.driver`.

    WARNING  a request failed, a cached prefix shrank, a page was not written below
    ERROR    a port raised
    INFO     promised, ready, ended, retracted, grown, refused
    DEBUG    every arrow of a request's machine
"""

import logging
from collections.abc import Sequence
from typing import Final

from kvlift.core.advance import Decision, State
from kvlift.core.edges import EDGES
from kvlift.core.effect import SendHold
from kvlift.core.event import Grown
from kvlift.core.ids import Rid
from kvlift.core.landed import Landed
from kvlift.core.notice import (
    BecameReady,
    HasEnded,
    HasGrown,
    HasShrunk,
    Notice,
    PageLost,
    WasPromised,
    WasRefused,
    WasRetracted,
)
from kvlift.core.phase import Ended, Outcome
from kvlift.core.plan import Plan
from kvlift.core.submission import Submission
from kvlift.runtime.observer import Adoption, SilentObserver
from kvlift.runtime.tick import Tick

LOG: Final = logging.getLogger("kvlift.driver")

CHARACTERS_MAX: Final = 200

_OF_REQUESTS: Final = frozenset(phase for phase, _event, _after in EDGES)


def plain(text: str) -> str:
    """One printable line, at most `CHARACTERS_MAX` characters."""
    escaped = text[:CHARACTERS_MAX].encode("unicode_escape").decode("ascii")
    return escaped[:CHARACTERS_MAX]


def sources(plan: Plan) -> str:
    """Pages by source, those that are none left out."""
    counts = plan.n_pages_by_source()
    return " ".join(f"{source.value}={n}" for source, n in counts.items() if n) or "none"


class DriverLog(SilentObserver):
    """`rank` is in every line, since ranks often share a log."""

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self._tick = 0
        self._ended: dict[str, HasEnded] = {}
        self._rid_by_attempt: dict[int, str] = {}

    def ticked(
        self,
        state: State,
        now_ns: int,
        reports: Sequence[Landed],
        least: tuple[int, ...] | None,
        calls: Sequence[Submission],
        decision: Decision,
    ) -> None:
        tick = self._tick = state.agreed.tick
        if LOG.isEnabledFor(logging.DEBUG):
            self._arrows(tick, decision)
        self._ended = {}
        for notice in decision.notices:
            self._notice(state, tick, notice)

    def told(self, state: State, tick: Tick) -> None:
        """Ends are logged here: only now is it known in words why."""
        for ended in tick.ended:
            notice = self._ended.get(ended.rid)
            attempt = 0 if notice is None else notice.attempt
            level = logging.WARNING if ended.outcome is Outcome.FAILED else logging.INFO
            why = f": {plain(ended.reason)}" if ended.reason else ""
            self._line(level, tick.number, ended.rid, attempt, f"{ended.outcome.value}{why}")

    def grew(self, state: State, rid: str, n_pages: int, decision: Decision, now_ns: int) -> None:
        attempt = _attempt(state, rid)
        is_granted = any(event is Grown for _phase, event, _after in decision.arrows)
        granted = "granted" if is_granted else "not granted at once"
        self._line(
            logging.DEBUG, state.agreed.tick, rid, attempt, f"growth by {n_pages} pages {granted}"
        )

    def adopted(self, state: State, what: Adoption, decision: Decision, now_ns: int) -> None:
        n_pages = what.stop - what.start
        words = f"adopted {n_pages} pages in {what.tier.value}"
        self._line(logging.INFO, state.agreed.tick, "-", 0, words)

    def failed(self, effect: object, error: Exception) -> None:
        # The effect's fields name pages and tickets, but some hold a prompt: its class is enough.
        rid, attempt = getattr(effect, "rid", "-"), getattr(effect, "attempt", 0)
        what = f"{type(effect).__name__} failed: {type(error).__name__}: {plain(str(error))}"
        self._line(logging.ERROR, self._tick, rid, attempt, what)

    def _arrows(self, tick: int, decision: Decision) -> None:
        for effect in decision.effects:
            if isinstance(effect, SendHold):
                self._rid_by_attempt[effect.attempt] = effect.rid
        for owner, (phase, event, after) in zip(decision.movers, decision.arrows, strict=True):
            if phase in _OF_REQUESTS:
                rid = self._rid_by_attempt.get(owner, "-")
                arrow = f"{phase.__name__} --{event.__name__}--> {after.__name__}"
                self._line(logging.DEBUG, tick, rid, owner, arrow)
                if after is Ended:
                    self._rid_by_attempt.pop(owner, None)

    def _notice(self, state: State, tick: int, notice: Notice) -> None:
        match notice:
            case HasEnded(rid=rid):
                self._ended[rid] = notice
            case WasPromised(rid=rid, attempt=attempt, plan=plan):
                words = f"admitted, promise={plan.promise} {sources(plan)}"
                self._line(logging.INFO, tick, rid, attempt, words)
            case BecameReady(rid=rid, attempt=attempt, plan=plan):
                self._line(logging.INFO, tick, rid, attempt, f"ready, {sources(plan)}")
            case HasShrunk(rid=rid, attempt=attempt, page=page):
                words = f"the cached prefix ends at page {page} now"
                self._line(logging.WARNING, tick, rid, attempt, words)
            case WasRetracted(rid=rid, attempt=attempt):
                self._line(logging.INFO, tick, rid, attempt, "retracted")
            case HasGrown(rid=rid, attempt=attempt, pages=pages):
                words = f"grown by {len(pages)} pages" if pages else "growth refused"
                self._line(logging.INFO, tick, rid, attempt, words)
            case WasRefused(rid=rid, call=call, phase=phase):
                words = f"{call} refused in phase {phase}"
                self._line(logging.INFO, tick, rid, _attempt(state, rid), words)
            case PageLost(tier=tier, n_pages=n_pages):
                words = f"{n_pages} pages could not be written to {tier}"
                self._line(logging.WARNING, tick, "-", 0, words)

    def _line(self, level: int, tick: int, rid: str, attempt: int, words: str) -> None:
        LOG.log(
            level,
            "rank=%d tick=%d rid=%s attempt=%s %s",
            self._rank,
            tick,
            plain(rid),
            attempt or "-",
            words,
        )


def _attempt(state: State, rid: str) -> int:
    return state.agreed.attempt_by_rid.get(Rid(rid), 0)
