"""A journal through the core again: the same decisions, or the first difference.

Only the agreed half decides, so a journal of one rank is enough, and no clock, port or other rank
is needed. What is compared at every tick: effects, arrows, notices, tickets that closed, and the
digest, which chains everything. Every recorded arrow must be one of the machine's.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Self

import msgspec
from attrs import evolve, frozen

from kvlift.core.adopt import adopt_agreed, stow_agreed
from kvlift.core.advance import Decision, advance_agreed, grow_agreed
from kvlift.core.agreed import Agreed, Kind, agreed_at_start, is_under_way
from kvlift.core.ballot import (
    N_HEADER,
    PAIRS,
    RankFailed,
    RanksDiverged,
    Verdict,
    ballot_length,
    from_wire,
    proofs,
    slots,
)
from kvlift.core.edges import EDGES, MIRROR_EDGES
from kvlift.core.ids import Rid
from kvlift.core.observation import N_INTS
from kvlift.core.policy import Policy, Switch
from kvlift.core.submission import Submission
from kvlift.core.tier import Tier
from kvlift.runtime.config import Config
from kvlift.runtime.journal_lines import (
    AdoptLine,
    ConfigLine,
    Decided,
    Entry,
    FaultLine,
    GrowLine,
    IdleLine,
    RaisedLine,
    TickLine,
    decided_of,
)
from kvlift.runtime.journal_read import JournalReader

ARROWS: Final = frozenset(
    (phase.__name__, event.__name__, after.__name__)
    for phase, event, after in (*EDGES, *MIRROR_EDGES)
)

TICKS_MAX: Final = 2**53
TOKEN_MAX: Final = 2**31


class Impossible(Exception):
    """The core can't decide what the journal says it decided; the message says why."""


@frozen(kw_only=True)
class Moment:
    """One line and what the core makes of it. `before` and `after` are None where the beginning of
    the journal is lost; `difference` is None where both decided the same."""

    line: Entry
    number: int
    tick: int
    before: Agreed | None = None
    after: Agreed | None = None
    verdict: Verdict | None = None
    difference: str | None = None


@frozen(kw_only=True)
class ReplayResult:
    """`ticks` and `requests` that were replayed; `is_cut`: the journal ends in half a line.
    `raised`: what the last tick raised, in words, if it did."""

    ticks: int
    requests: int
    identical: bool
    first_difference: str | None
    is_cut: bool = False
    last: Agreed | None = None
    raised: str | None = None


def replay(lines: Iterable[bytes], upto: int | None = None) -> ReplayResult:
    """Up to the first difference, or to the tick `upto`. Raises `JournalError`."""
    reader = JournalReader.of(lines)
    replayer = Replayer(reader)
    difference = raised = None
    for moment in replayer.moments(upto):
        difference = moment.difference
        raised = raised_words(moment.line) if isinstance(moment.line, RaisedLine) else None
    agreed = replayer.agreed
    return ReplayResult(
        ticks=agreed.tick,
        requests=agreed.next_attempt - 1,
        identical=difference is None,
        first_difference=difference,
        is_cut=reader.is_cut,
        last=agreed,
        raised=raised,
    )


def raised_words(line: RaisedLine) -> str:
    return f"tick {line.tick} raised {line.error[:80]} while {line.during}: {line.words[:500]}"


def moments(reader: JournalReader) -> Iterator[Moment]:
    """With the core's states where the journal is whole; else the lines alone."""
    if reader.header.n_lost == 0:
        yield from Replayer(reader).moments()
        return
    tick = 0
    for line in reader:
        if isinstance(line, TickLine):
            tick = line.tick
        elif isinstance(line, IdleLine):
            tick += line.n
        yield Moment(line=line, number=reader.number, tick=tick)


class Replayer:
    """Raises `JournalError` at once for a journal that has lost its beginning."""

    def __init__(self, reader: JournalReader) -> None:
        if reader.header.n_lost:
            raise reader.error(
                f"{reader.header.n_lost} lines in front of this one are lost, and"
                " nothing can be decided again without them: use journal=file, or a larger"
                " journal_ring_ticks or journal_files_max (`explain` works with what is left)"
            )
        self.reader = reader
        self.config: Config = reader.config
        self.policy: Policy = reader.config.policy()
        storage = Switch.ON if reader.header.has_storage else Switch.OFF
        self.agreed = agreed_at_start(self.policy, storage)
        self._voted = self.agreed
        self._is_ballot_out = False
        self._is_hosted = reader.header.is_hosted

    def moments(self, upto: int | None = None) -> Iterator[Moment]:
        """Line by line, and no further than the first difference."""
        for line in self.reader:
            before = self.agreed
            is_between = not isinstance(line, TickLine | IdleLine)
            if upto is not None and before.tick >= upto and not is_between:
                return
            verdict = None
            difference = None
            try:
                match line:
                    case TickLine():
                        verdict = self._verdict(line)
                        self._tick(line, verdict)
                        self._vote()
                    case IdleLine(n=n):
                        n_ticks = n if upto is None else min(n, upto - before.tick)
                        self._idle(n_ticks)
                        self._vote()
                    case GrowLine():
                        self._grow(line)
                    case AdoptLine():
                        self._adopt(line)
                    case ConfigLine():
                        self.config, self.policy = self.reader.config, self.reader.config.policy()
                    case RaisedLine():
                        self._raised(line)
                    case FaultLine():
                        pass
            except Impossible as error:
                difference = str(error)
            yield Moment(
                line=line,
                number=self.reader.number,
                tick=self.agreed.tick,
                before=before,
                after=self.agreed,
                verdict=verdict,
                difference=difference,
            )
            if difference is not None:
                return

    # One line each.

    def _tick(self, line: TickLine, verdict: Verdict | None) -> None:
        calls = [self.reader.call(value) for value in line.calls]
        for value in line.reports:
            self.reader.report(value)  # they decide nothing here, but others read them
        with Judged(f"tick {line.tick}") as judged:
            agreed, decision = advance_agreed(self.agreed, verdict, calls, self.policy)
            judged.compare(line.decided, decision, agreed)
        self.agreed = agreed

    def _vote(self) -> None:
        """As the driver at the end of a tick."""
        self._voted = self.agreed
        is_always = self.config.idle_ballots is Switch.ON
        self._is_ballot_out = not self._is_hosted and (is_always or is_under_way(self.agreed))

    def _raised(self, line: RaisedLine) -> None:
        """What a tick raised about a ballot, or in the core, is raised again."""
        if line.during == "telling":
            if line.tick != self.agreed.tick:
                raise self.reader.error(f"tick {line.tick} raised, and {self.agreed.tick} is told")
            return
        self._check_follows(line.tick)
        calls = [self.reader.call(value) for value in line.calls]
        if line.during in ("hearing", "waiting"):
            return
        least = None if line.least is None else self._whole(line.least)
        verdict, found = None, "nothing"
        try:
            if least is not None:
                verdict = from_wire(least, self._voted, self.policy)
        except (RanksDiverged, RankFailed) as error:
            found = type(error).__name__
        else:
            found = self._core_raises(least, verdict, calls)
        if found != line.error:
            raise Impossible(
                f"tick {line.tick}: it raised {line.error[:80]}, the core raises {found}"
            )

    def _core_raises(
        self, least: tuple[int, ...] | None, verdict: Verdict | None, calls: Sequence[Submission]
    ) -> str:
        """The class of what the core raises here."""
        if least is not None and verdict is not None:
            self._check_sizes(least, verdict)
        try:
            advance_agreed(self.agreed, verdict, calls, self.policy)
        except Exception as error:  # noqa: BLE001 - whatever it was, it is compared
            return type(error).__name__
        return "nothing"

    def _check_follows(self, tick: int) -> None:
        if tick != self.agreed.tick + 1:
            raise self.reader.error(
                f"tick {tick} follows tick {self.agreed.tick}: lines are missing or moved"
            )

    def _whole(self, least: tuple[int, ...]) -> tuple[int, ...]:
        n_missing = ballot_length(self.policy) - len(least)
        if n_missing < 0:
            raise self.reader.error(f"a ballot of {len(least)} integers is too long")
        return least + (0,) * n_missing

    def _verdict(self, line: TickLine) -> Verdict | None:
        self._check_follows(line.tick)
        if line.least is None:
            if self._is_ballot_out:
                raise Impossible(f"tick {line.tick}: its ballot is missing")
            return None
        least = self._whole(line.least)
        told = tuple(least[2 * at] for at in range(len(PAIRS)))
        voted = proofs(self._voted)
        if told != voted:
            at = next(at for at in range(len(PAIRS)) if told[at] != voted[at])
            raise Impossible(f"tick {line.tick}: the ballot was about another {PAIRS[at]!r}")
        try:
            verdict = from_wire(least, self._voted, self.policy)
        except (RanksDiverged, RankFailed) as error:
            raise Impossible(f"tick {line.tick}: {error}") from None
        self._check_sizes(least, verdict)
        return verdict

    def _check_sizes(self, least: tuple[int, ...], verdict: Verdict) -> None:
        """No verdict can be about more pages than there are; the core relies on its ranks."""
        config, tickets = self.config, self._voted.tickets
        if verdict.device_room > config.device_pages or verdict.host_room > config.host_pages:
            raise self.reader.error("a verdict about more pages than the config has")
        for ticket, seen in verdict.observations:
            known = tickets[ticket]
            most = known.n_pages
            if known.kind is Kind.TOKEN:
                most = TOKEN_MAX
            elif known.kind is Kind.HOLD:
                most = config.device_pages
            is_count = 0 <= seen.progress <= most and seen.ceiling <= most
            if not is_count or seen.ended not in (0, 1):
                raise self.reader.error(f"a verdict about ticket {ticket} that no rank could give")
        n_slots = len(slots(self._voted, self.policy))
        if any(least[N_HEADER + N_INTS * n_slots :]):
            raise self.reader.error("a ballot that speaks of tickets that are not open")

    def _idle(self, n_ticks: int) -> None:
        """Ticks in which nothing happened. Once one changed nothing, the others change nothing."""
        if not 0 < n_ticks <= TICKS_MAX:
            raise self.reader.error(f"{n_ticks} idle ticks")
        at = self.agreed.tick + 1
        if self._is_ballot_out:
            raise Impossible(f"tick {at}: its ballot is missing")
        with Judged(f"tick {at}") as judged:
            agreed, decision = advance_agreed(self.agreed, None, (), self.policy)
            judged.compare(Decided(digest=self.agreed.digest.hex()), decision, agreed)
            if n_ticks > 1 and is_under_way(agreed) and not self._is_hosted:
                raise Impossible(f"tick {at + 1}: its ballot is missing")
        self.agreed = evolve(agreed, tick=agreed.tick + n_ticks - 1)

    def _grow(self, line: GrowLine) -> None:
        if not 0 < line.n_pages <= self.config.device_pages:
            raise self.reader.error(f"a growth by {line.n_pages} pages")
        with Judged(f"the growth of {line.rid[:80]!r} after tick {self.agreed.tick}") as judged:
            agreed, decision, _pages = grow_agreed(
                self.agreed, Rid(line.rid), line.n_pages, self.policy
            )
            judged.compare(line.decided, decision, agreed)
        self.agreed = agreed

    def _adopt(self, line: AdoptLine) -> None:
        prompt = self.reader.prompt(line.prompt)
        is_tier = line.tier in (Tier.DEVICE.value, Tier.HOST.value)
        if not is_tier or not 0 <= line.start <= line.stop <= prompt.n_pages_full:
            raise self.reader.error("an adoption of pages that there are not")
        with Judged(f"the adoption after tick {self.agreed.tick}") as judged:
            if line.is_stow:
                agreed, decision, _adopted = stow_agreed(
                    self.agreed, prompt, line.start, line.stop, self.policy
                )
            else:
                agreed, decision, _adopted = adopt_agreed(
                    self.agreed, Tier(line.tier), prompt, line.start, line.stop, self.policy
                )
            judged.compare(line.decided, decision, agreed)
        self.agreed = agreed


class Judged:
    """Compares, and turns every exception of the core into a difference: a journal that was changed
    can break any rule of the core's callers, and the core raises where they are broken."""

    def __init__(self, when: str) -> None:
        self.when = when

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, Impossible):
            words = f"{type(error).__name__}: {error}"[:300]
            raise Impossible(f"{self.when}: the core refuses what is recorded: {words}") from error

    def compare(self, told: Decided, decision: Decision, agreed: Agreed) -> None:
        """Raises `Impossible` with the first difference."""
        for arrow in told.arrows:
            if (arrow.phase, arrow.event, arrow.after) not in ARROWS:
                raise Impossible(
                    f"{self.when}: the journal has an arrow that the machine has not:"
                    f" {arrow.phase} --{arrow.event}--> {arrow.after}"[:300]
                )
        made = msgspec.json.decode(msgspec.json.encode(decided_of(decision, agreed)), type=Decided)
        self._rows("effects", told.effects, made.effects)
        self._rows("arrows", told.arrows, made.arrows)
        self._rows("notices", told.notices, made.notices)
        self._rows("closed tickets", told.closed, made.closed)
        if told.digest != made.digest:
            raise Impossible(
                f"{self.when}: the digest is {made.digest}, the journal has {told.digest[:64]}:"
                " a prompt, an output, a verdict or the state before was another"
            )

    def _rows(self, what: str, told: Sequence[object], made: Sequence[object]) -> None:
        if told == made:
            return
        at = next(
            (at for at, pair in enumerate(zip(told, made, strict=False)) if pair[0] != pair[1]),
            min(len(told), len(made)),
        )
        theirs = _shown(told[at]) if at < len(told) else "no more"
        ours = _shown(made[at]) if at < len(made) else "no more"
        raise Impossible(
            f"{self.when}: {what} differ at place {at + 1}:"
            f" the journal has {theirs}, the core decides {ours}"
        )


def _shown(row: object) -> str:
    text = msgspec.json.encode(row).decode()
    return text if len(text) <= 200 else text[:200] + "..."
