"""One request's life in plain words, from a journal.

What it says: what was found where, what was promised, what landed when, why it waited, why it
shrank, how it ended. From a ring that has lost its beginning it tells less: why a request waited
can be seen from the core's state alone.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from attrs import define, field, frozen

from kvlift.core.admission import further_ones, offer_for
from kvlift.core.agreed import Agreed, Request
from kvlift.core.draft import Draft
from kvlift.core.ids import Attempt
from kvlift.core.index import match
from kvlift.core.landed import Landed
from kvlift.core.notice import Notice, WasPromised
from kvlift.core.observation import OVERDUE, Observation
from kvlift.core.phase import Asking, Resuming, Waiting
from kvlift.core.policy import Policy, Switch
from kvlift.core.submission import Submission, Submit
from kvlift.runtime.explain_words import (
    ARROWS,
    DETACHED,
    ENOUGH,
    TOO_SLOW,
    WHY_SHRUNK,
    notice_words,
    pages,
    report_words,
    span,
    started_words,
    why_not_read,
)
from kvlift.runtime.journal_lines import (
    ArrowRow,
    Decided,
    EffectRow,
    GrowLine,
    RaisedLine,
    TickLine,
)
from kvlift.runtime.journal_read import JournalReader
from kvlift.runtime.log import plain
from kvlift.runtime.replay import Moment, moments, raised_words

NS_PER_MS: Final = 1_000_000

EVENTS_MAX: Final = 100_000
"""What one explanation says at most."""


@frozen(kw_only=True)
class Told:
    """One sentence. `ms`: since the first tick of the journal that has a time; `attempt` counts the
    submissions of all requests."""

    tick: int
    ms: float
    attempt: int
    text: str


def explain(lines: Iterable[bytes], rid: str) -> list[Told]:
    """Empty where the journal does not name the request. Raises `JournalError`."""
    reader = JournalReader.of(lines)
    life = Life(rid, reader)
    n_lost = reader.header.n_lost
    for moment in moments(reader):
        if moment.difference is not None:
            life.say(moment.tick, f"(the journal can't be followed further: {moment.difference})")
            break
        life.live(moment)
        if len(life.told) >= EVENTS_MAX:
            life.say(moment.tick, f"(cut after {EVENTS_MAX} sentences)")
            break
    if not life.attempts:
        return []
    if n_lost:
        text = f"(the journal has lost its first {n_lost} lines: what they told is missing here)"
        life.told.insert(0, Told(tick=0, ms=0.0, attempt=0, text=text))
    return life.told


@define(eq=False)
class Life:
    """What has been told of one request so far. `tickets`: what each of its tickets is for."""

    rid: str
    reader: JournalReader
    told: list[Told] = field(factory=list)
    attempts: list[int] = field(factory=list)
    tickets: dict[int, EffectRow] = field(factory=dict)
    _now_ns: int = 0
    _start_ns: int | None = None
    _why_waiting: str | None = None

    @property
    def attempt(self) -> int:
        return self.attempts[-1] if self.attempts else 0

    def say(self, tick: int, text: str, attempt: int | None = None) -> None:
        start_ns = self._now_ns if self._start_ns is None else self._start_ns
        ms = (self._now_ns - start_ns) / NS_PER_MS
        whose = self.attempt if attempt is None else attempt
        self.told.append(Told(tick=tick, ms=ms, attempt=whose, text=text))

    def live(self, moment: Moment) -> None:
        """Everything that this line says about the request."""
        match moment.line:
            case TickLine() as line:
                self._note_time(line.now_ns)
                notices = [self.reader.notice(value) for value in line.decided.notices]
                for notice in notices:
                    if getattr(notice, "rid", None) == self.rid and hasattr(notice, "attempt"):
                        self._meet(notice.attempt)
                for value in line.reports:
                    self._report(moment.tick, self.reader.report(value))
                for call in line.calls:
                    self._call(moment, self.reader.call(call))
                self._decided(moment, line.decided, notices)
                self._wait(moment)
            case GrowLine() as line if line.rid == self.rid:
                self._note_time(line.now_ns)
                was_granted = any(arrow.event == "Grown" for arrow in line.decided.arrows)
                answer = "granted" if was_granted else "not granted at once"
                self.say(moment.tick, f"asks for {pages(line.n_pages)} more: {answer}")
            case RaisedLine() as line:
                self._note_time(line.now_ns)
                if self.attempts:
                    self.say(moment.tick, f"{raised_words(line)}; its ranks end here")
            case _:
                pass

    def _note_time(self, now_ns: int) -> None:
        self._now_ns = now_ns
        if self._start_ns is None:
            self._start_ns = now_ns

    def _meet(self, attempt: int) -> None:
        if attempt not in self.attempts:
            self.attempts.append(attempt)

    # Calls, reports, decisions.

    def _call(self, moment: Moment, call: Submission) -> None:
        if getattr(call, "rid", None) != self.rid:
            return
        if not isinstance(call, Submit):
            self.say(moment.tick, f"the host calls {type(call).__name__.lower()}")
            return
        if moment.after is not None:
            attempt = moment.after.attempt_by_rid.get(call.rid)
            if attempt is not None:
                self._meet(attempt)
        prompt, found = call.prompt, ""
        if moment.before is not None:
            hit = match(moment.before.index, prompt)
            found = f"; in the cache: {pages(hit.device)} on the device"
            found += f", then up to page {hit.host - 1} on the host" * (hit.host > hit.device)
        self.say(
            moment.tick,
            f"submitted: {prompt.n_tokens} tokens in {pages(prompt.n_pages)} of"
            f" {prompt.page_tokens}; prefill node {plain(call.peer)}{found}",
        )

    def _report(self, tick: int, report: Landed) -> None:
        row = self.tickets.get(report.ticket)
        if row is not None:
            self.say(tick, f"on this rank: {report_words(report, row)}", row.owner)

    def _decided(self, moment: Moment, decided: Decided, notices: list[Notice]) -> None:
        for arrow in decided.arrows:
            text = self._arrow_words(moment, arrow)
            if arrow.owner in self.attempts and text is not None:
                self.say(moment.tick, text, arrow.owner)
        for notice in notices:
            if getattr(notice, "rid", None) == self.rid:
                attempt = getattr(notice, "attempt", None)
                why = self._why_shrunk(moment, decided.arrows, attempt)
                self.say(moment.tick, notice_words(notice, why), attempt)
                if isinstance(notice, WasPromised):
                    self._say_what_is_not_read(moment, notice)
        for row in decided.effects:
            known = self.tickets.get(row.ticket)
            if row.owner in self.attempts:
                for ticket in (row.ticket, row.second):
                    if ticket:
                        self.tickets.setdefault(ticket, row)
                self.say(moment.tick, started_words(row), row.owner)
            elif known is not None:
                self.say(moment.tick, started_words(row), known.owner)
        for arrow in decided.arrows:
            if arrow.owner in self.attempts and arrow.event == "Drained":
                self.say(moment.tick, "nothing touches its pages any more", arrow.owner)

    def _arrow_words(self, moment: Moment, arrow: ArrowRow) -> str | None:
        match arrow.event:
            case "StorageAnswered":
                return self._answer_words(moment, arrow.owner)
            case "ReadOverdue":
                why = self._why_given_up(moment, arrow.owner)
                return ARROWS[arrow.event] + (f": {why}" if why else "")
            case _:
                return ARROWS.get(arrow.event)

    def _answer_words(self, moment: Moment, attempt: int) -> str:
        """What all ranks have in storage of the pages that were asked for, if they have said so."""
        found = self._news(moment, attempt, "StartLookup")
        if found is None:
            return ARROWS["StorageAnswered"]
        row, seen = found
        if seen.ended:
            return f"all ranks know what storage has: {seen.progress} of {pages(row.n_pages)}"
        return f"{ARROWS['StorageAnswered']}: some rank has found nothing, or waited too long"

    def _say_what_is_not_read(self, moment: Moment, notice: WasPromised) -> None:
        """Pages that storage has for a request, and that its admission leaves there."""
        request = None if moment.before is None else moment.before.requests.get(notice.attempt)
        if request is None or moment.after is None or moment.after.storage is Switch.OFF:
            return
        start = stop = 0
        found = self._news(moment, notice.attempt, "StartLookup")
        if found is not None:
            start, stop = found[0].start, found[0].start + found[1].progress
        elif isinstance(request.phase, Waiting):
            start, stop = request.phase.stored_start, request.phase.stored_stop
        bounds = notice.plan.bounds
        if start <= bounds.host and bounds.storage < stop:
            n_read, n_left = bounds.storage - bounds.host, stop - bounds.storage
            why = why_not_read(moment.after.rates, self.reader.config, n_read, n_left)
            text = f"{span(bounds.storage, n_left)} stay in storage: {why}"
            self.say(moment.tick, text, notice.attempt)

    def _why_given_up(self, moment: Moment, attempt: int) -> str:
        """Of a read. Nothing where the core's state is not known."""
        if isinstance(moment.line, TickLine) and any(
            "DetachStorage" in call for call in moment.line.calls
        ):
            return DETACHED
        if moment.before is None:
            return ""
        found = self._news(moment, attempt, "StartPrefetch")
        return ENOUGH if found is None or found[1].ceiling != OVERDUE else TOO_SLOW

    def _news(
        self, moment: Moment, attempt: int, what: str
    ) -> tuple[EffectRow, Observation] | None:
        """What the verdict says anew of the ticket that such an effect of the attempt began."""
        for ticket, seen in () if moment.verdict is None else moment.verdict.observations:
            row = self.tickets.get(ticket)
            if row is not None and (row.what, row.owner, row.ticket) == (what, attempt, ticket):
                return row, seen
        return None

    def _why_shrunk(self, moment: Moment, arrows: Iterable[ArrowRow], attempt: int | None) -> str:
        happened = {arrow.event for arrow in arrows if arrow.owner == attempt}
        event = next((event for event in WHY_SHRUNK if event in happened), None)
        if event is None or attempt is None:
            return ""
        why = self._why_given_up(moment, attempt) if event == "ReadOverdue" else ""
        return WHY_SHRUNK[event] + (f": {why}" if why else "")

    def _wait(self, moment: Moment) -> None:
        """Said once for each reason, not at every tick. Room is tried with a verdict only."""
        if moment.after is None:
            return
        alive = [a for a in self.attempts if a in moment.after.requests]
        if not alive:
            return
        request = moment.after.requests[Attempt(alive[-1])]
        why = why_waiting(moment.after, request, self.reader.config.policy())
        if why is None:
            self._why_waiting = None
        elif why[0] != self._why_waiting and (moment.verdict is not None or why[0] == "storage"):
            self._why_waiting = why[0]
            self.say(moment.tick, why[1], request.attempt)


def why_waiting(agreed: Agreed, request: Request, policy: Policy) -> tuple[str, str] | None:
    """What a request waits for before it is admitted: a word for the reason, and a sentence."""
    match request.phase:
        case Asking():
            return "storage", "waits for what storage has"
        case Resuming(tail_copy=copy) if copy is not None:
            return "tail", "waits for the copy of its last page before it can come back"
        case Waiting(n_bypassed=n_bypassed) | Resuming(n_bypassed=n_bypassed):
            draft = Draft(agreed, policy)
            if offer_for(draft, request, further_ones(draft)) is not None:
                return (
                    "line",
                    "there is room for it, but another request ahead of it holds the line",
                )
            return "room", _room_words(draft, request, n_bypassed)
        case _:
            return None


def _room_words(draft: Draft, request: Request, n_bypassed: int) -> str:
    n_needed = request.prompt.n_pages - match(draft.index.view(), request.prompt).device
    free, idle = draft.n_device_free(), draft.index.n_device_idle
    reserve = draft.policy.decode_reserve_pages
    ahead = [r.rid for r in _ahead(draft, request)]
    words = (
        f"waits for room: it needs {pages(n_needed)} of the device; {free} are free and {idle}"
        " cached ones are unused"
    )
    if reserve:
        words += f", and {reserve} a request are kept for growth"
    if ahead:
        words += f"; ahead in the line: {', '.join(ahead[:3])}"
        words += f" and {len(ahead) - 3} more" if len(ahead) > 3 else ""
    return words + (f"; overtaken {n_bypassed} times" if n_bypassed else "")


def _ahead(draft: Draft, request: Request) -> Iterator[Request]:
    for other in draft.requests.values():
        is_waiting = isinstance(other.phase, Waiting | Resuming)
        rank = (-other.priority, other.attempt)
        if is_waiting and rank < (-request.priority, request.attempt):
            yield other
