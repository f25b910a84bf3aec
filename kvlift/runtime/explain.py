"""One request's life in plain words, from a journal.

What it says: what was found where, what was promised, what landed when, why it waited, why it
shrank, how it ended. From a ring that has lost its beginning it tells less: why a request waited can
be seen from the core's state alone.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from attrs import define, field, frozen

from kvlift.core.admission import offer_for
from kvlift.core.agreed import Agreed, Request
from kvlift.core.draft import Draft
from kvlift.core.index import match
from kvlift.core.phase import Asking, Resuming, Waiting
from kvlift.core.policy import Policy
from kvlift.runtime.explain_words import (
    ARROWS,
    WHY_SHRUNK,
    notice_words,
    pages,
    report_words,
    started_words,
)
from kvlift.runtime.journal_lines import ArrowRow, Decided, EffectRow, GrowLine, Named, TickLine
from kvlift.runtime.journal_read import JournalReader
from kvlift.runtime.replay import Moment, moments

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
    if reader.header.n_lost:
        life.say(0, f"(the journal has lost its first {reader.header.n_lost} lines)")
    n_before = len(life.told)
    for moment in moments(reader):
        life.live(moment)
        if moment.difference is not None:
            life.say(moment.tick, f"(replay ends here: {moment.difference})")
            break
        if len(life.told) >= EVENTS_MAX:
            life.say(moment.tick, f"(cut after {EVENTS_MAX} sentences)")
            break
    return life.told if life.attempts or len(life.told) > n_before else []


@define(eq=False)
class Life:
    """What has been told of one request so far. `tickets`: what each of its tickets is for."""

    rid: str
    reader: JournalReader
    told: list[Told] = field(factory=list)
    attempts: list[int] = field(factory=list)
    tickets: dict[int, EffectRow] = field(factory=dict)
    n_good: dict[int, int] = field(factory=dict)
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
                self._meet(line.decided)
                for value in line.calls:
                    self._call(moment, value)
                for value in line.reports:
                    self._report(moment.tick, value)
                self._decided(moment, line.decided)
                self._wait(moment)
            case GrowLine() as line if line.rid == self.rid:
                self._note_time(line.now_ns)
                was_granted = any(arrow.event == "Grown" for arrow in line.decided.arrows)
                answer = "granted" if was_granted else "not granted at once"
                self.say(moment.tick, f"asks for {pages(line.n_pages)} more: {answer}")
            case _:
                pass

    def _note_time(self, now_ns: int) -> None:
        self._now_ns = now_ns
        if self._start_ns is None:
            self._start_ns = now_ns

    def _meet(self, decided: Decided) -> None:
        """Which attempts are this request's: its hold says it, or a notice."""
        for value in decided.notices:
            for fields in value.values():
                if isinstance(fields, dict) and fields.get("rid") == self.rid:
                    attempt = fields.get("attempt")
                    if isinstance(attempt, int) and attempt not in self.attempts:
                        self.attempts.append(attempt)

    # Calls, reports, decisions.

    def _call(self, moment: Moment, value: Named) -> None:
        (name, fields), *_rest = value.items()
        if fields.get("rid") != self.rid:
            return
        if name != "Submit":
            self.say(moment.tick, f"the host calls {name.lower()}")
            return
        if moment.after is not None:
            attempt = moment.after.attempt_by_rid.get(fields["rid"])
            if attempt is not None and attempt not in self.attempts:
                self.attempts.append(attempt)
        call = self.reader.call(value)
        prompt = getattr(call, "prompt", None)
        assert prompt is not None
        found = ""
        if moment.before is not None:
            hit = match(moment.before.index, prompt)
            found = f"; cached: {pages(hit.device)} on the device"
            found += f", up to page {hit.host} with the host" if hit.host > hit.device else ""
        self.say(
            moment.tick,
            f"submitted: {prompt.n_tokens} tokens, {pages(prompt.n_pages)} of"
            f" {prompt.page_tokens} tokens; prefill node {fields.get('peer')}{found}",
        )

    def _report(self, tick: int, value: Named) -> None:
        report = self.reader.report(value)
        row = self.tickets.get(report.ticket)
        if row is not None:
            self.say(tick, f"on this rank: {report_words(report, row)}", row.owner)

    def _decided(self, moment: Moment, decided: Decided) -> None:
        for row in decided.effects:
            if row.owner in self.attempts:
                if row.ticket:
                    self.tickets.setdefault(row.ticket, row)
                self.say(moment.tick, started_words(row), row.owner)
            elif row.ticket in self.tickets:
                self.say(moment.tick, started_words(row), self.tickets[row.ticket].owner)
        for arrow in decided.arrows:
            text = ARROWS.get(arrow.event)
            if arrow.owner in self.attempts and text is not None:
                self.say(moment.tick, text, arrow.owner)
        for value in decided.notices:
            (name, fields), *_rest = value.items()
            if fields.get("rid") == self.rid:
                why = _why_shrunk(decided.arrows, fields.get("attempt"))
                self.say(moment.tick, notice_words(name, fields, why), fields.get("attempt"))

    def _wait(self, moment: Moment) -> None:
        """Said once for each reason, not at every tick."""
        if moment.after is None or not self.attempts:
            return
        request = next(
            (moment.after.requests[a] for a in self.attempts if a in moment.after.requests), None
        )
        why = None
        if request is not None:
            why = why_waiting(moment.after, request, self.reader.config.policy())
        if why is not None and why[0] != self._why_waiting:
            self.say(moment.tick, why[1], request.attempt if request is not None else None)
        self._why_waiting = None if why is None else why[0]


def _why_shrunk(arrows: Iterable[ArrowRow], attempt: object) -> str:
    happened = {arrow.event for arrow in arrows if arrow.owner == attempt}
    return next((text for event, text in WHY_SHRUNK.items() if event in happened), "")


def why_waiting(agreed: Agreed, request: Request, policy: Policy) -> tuple[str, str] | None:
    """What a request waits for before it is admitted: a word for the reason, and a sentence."""
    match request.phase:
        case Asking():
            return "storage", "waits for what storage has"
        case Resuming(tail_copy=copy) if copy is not None:
            return "tail", "waits for the copy of its last page before it can come back"
        case Waiting(n_bypassed=n_bypassed) | Resuming(n_bypassed=n_bypassed):
            draft = Draft(agreed, policy)
            if offer_for(draft, request) is not None:
                return "line", "could be admitted at the next verdict, unless the line is held"
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
