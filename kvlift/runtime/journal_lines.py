"""The lines of a journal: what each holds, and the way from the driver's values to them.

One JSON object a line (NDJSON), told apart by the field `line`:

    journal   the first line: format, config, rank, and how many lines a ring has lost behind it
    tick      a tick in which something happened
    idle      `n` ticks in which nothing did
    grow      a growth between two ticks
    adopt     pages that were adopted between two ticks
    config    other choices and limits from here on
    fault     a port of this rank raised
    raised    a tick raised: the last line, unless the host went on

Calls, reports and notices are written as `{"ClassName": {fields}}`, bytes in base64; effects and
arrows as short rows. A journal holds prompts and answers: everything needed to decide again.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from kvlift.core.advance import Decision
from kvlift.core.agreed import Agreed, Kind
from kvlift.core.effect import (
    CancelPersist,
    CancelPrefetch,
    CancelRestore,
    ClosePeer,
    Effect,
    ForgetStorage,
    FreeDevice,
    FreeHost,
    SendAborted,
    SendCommitted,
    SendHold,
    SendWant,
    StartLookup,
    StartMirror,
    StartPersist,
    StartPrefetch,
    StartRestore,
    TakeDevice,
    TakeHost,
)
from kvlift.core.ids import Ticket
from kvlift.runtime.observer import During

FORMAT: Final = 2
NOTE: Final = "This journal holds the prompts and answers of users as tokens. Keep it private."

Named: TypeAlias = dict[str, Any]
"""A value of the core under the name of its class."""


class EffectRow(msgspec.Struct, array_like=True, frozen=True):
    """`owner`: the attempt whose ticket it is, 0 where nobody's or not known; `start`: its first
    page in the prompt, where it has one; `second`: the ticket of a read's restore, or of the first
    token that a want awaits."""

    what: str
    ticket: int
    owner: int
    start: int
    n_pages: int
    second: int = 0


class ArrowRow(msgspec.Struct, array_like=True, frozen=True):
    """`owner`: the attempt; of a way down, the descent."""

    owner: int
    phase: str
    event: str
    after: str


class Header(
    msgspec.Struct, tag="journal", tag_field="line", forbid_unknown_fields=True, frozen=True
):
    """`n_lost`: lines in front of this one that are not here: a ring has dropped them, or they are
    in the earlier parts of a journal that has grown beyond one file. Without them nothing can be
    decided again. `begun_ns`: when the run began, by the wall clock; all its parts say the same.

    `is_hosted`: of a scheduler with workers, which may tick before it has its ballots back."""

    format: int
    config: dict[str, int | str]
    has_storage: bool
    rank: int
    n_ranks: int
    n_lost: int = 0
    note: str = NOTE
    part: int = 1
    begun_ns: int = 0
    is_hosted: bool = False


class Decided(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """What the core decided; `digest` is the agreed state's after it, in hexadecimal."""

    digest: str
    effects: tuple[EffectRow, ...] = ()
    notices: tuple[Named, ...] = ()
    arrows: tuple[ArrowRow, ...] = ()
    closed: tuple[int, ...] = ()


class TickLine(
    msgspec.Struct,
    tag="tick",
    tag_field="line",
    forbid_unknown_fields=True,
    omit_defaults=True,
    frozen=True,
):
    """`least`: the reduced ballot without the zeros at its end; None where there was none.

    `reports` are what this rank's ports said; they reach the core by later ballots alone."""

    tick: int
    now_ns: int
    decided: Decided
    least: tuple[int, ...] | None = None
    calls: tuple[Named, ...] = ()
    reports: tuple[Named, ...] = ()


class IdleLine(
    msgspec.Struct, tag="idle", tag_field="line", forbid_unknown_fields=True, frozen=True
):
    n: int


class GrowLine(
    msgspec.Struct, tag="grow", tag_field="line", forbid_unknown_fields=True, frozen=True
):
    now_ns: int
    rid: str
    n_pages: int
    decided: Decided


class AdoptLine(
    msgspec.Struct, tag="adopt", tag_field="line", forbid_unknown_fields=True, frozen=True
):
    now_ns: int
    tier: str
    prompt: Any
    start: int
    stop: int
    decided: Decided
    is_stow: bool = False


class ConfigLine(
    msgspec.Struct, tag="config", tag_field="line", forbid_unknown_fields=True, frozen=True
):
    config: dict[str, int | str]


class FaultLine(
    msgspec.Struct, tag="fault", tag_field="line", forbid_unknown_fields=True, frozen=True
):
    effect: str
    error: str


class RaisedLine(
    msgspec.Struct,
    tag="raised",
    tag_field="line",
    forbid_unknown_fields=True,
    omit_defaults=True,
    frozen=True,
):
    """A tick that raised. `during`: how far it had come (see `Round`); what is known by then is in
    the other fields, as in a tick's line."""

    tick: int
    now_ns: int
    during: During
    error: str
    words: str
    least: tuple[int, ...] | None = None
    calls: tuple[Named, ...] = ()
    reports: tuple[Named, ...] = ()


Entry: TypeAlias = TickLine | IdleLine | GrowLine | AdoptLine | ConfigLine | FaultLine | RaisedLine
"""Every line but the first."""

Line: TypeAlias = Header | Entry


def encoded(line: Line) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def named(values: Iterable[object]) -> tuple[Named, ...]:
    return tuple({type(value).__name__: value} for value in values)


def without_zeros(least: tuple[int, ...]) -> tuple[int, ...]:
    """Slots that nobody uses are zeros at the end; they come back by the ballot's known length."""
    size, step = len(least), 96
    while size > 0 and not any(least[max(0, size - step) : size]):
        size = max(0, size - step)
    while size > 0 and least[size - 1] == 0:
        size -= 1
    return least[:size]


def effect_rows(effects: Sequence[Effect], agreed: Agreed) -> tuple[EffectRow, ...]:
    """`agreed` is the state after the decision: it knows whose the new tickets are."""
    return tuple(_row(effect, agreed) for effect in effects)


def decided_of(decision: Decision, agreed: Agreed) -> Decided:
    """`agreed` is the state after the decision."""
    return Decided(
        digest=agreed.digest.hex(),
        effects=effect_rows(decision.effects, agreed),
        notices=named(decision.notices),
        arrows=arrow_rows(decision),
        closed=decision.closed,
    )


def arrow_rows(decision: Decision) -> tuple[ArrowRow, ...]:
    return tuple(
        ArrowRow(owner, phase.__name__, event.__name__, after.__name__)
        for owner, (phase, event, after) in zip(decision.movers, decision.arrows, strict=True)
    )


def _row(effect: Effect, agreed: Agreed) -> EffectRow:
    ticket = Ticket(getattr(effect, "ticket", 0))
    known = agreed.tickets.get(ticket)
    owner = 0
    if isinstance(effect, SendHold):
        owner = effect.attempt
    elif known is not None and known.kind not in (Kind.MIRROR, Kind.PERSIST):
        owner = known.owner
    second = 0
    if isinstance(effect, StartPrefetch):
        second = effect.restore
    elif isinstance(effect, SendWant):
        second = effect.token or 0
    start, n_pages = _extent(effect)
    return EffectRow(type(effect).__name__, ticket, owner, start, n_pages, second)


def _extent(effect: Effect) -> tuple[int, int]:
    """The first page and the number of pages that an effect is about."""
    match effect:
        case TakeDevice() | FreeDevice() | TakeHost() | FreeHost():
            return 0, len(effect.pages)
        case StartLookup(start=start, stop=stop):
            return start, stop - start
        case StartPrefetch(start=start, host=host):
            return start, len(host)
        case CancelPrefetch(n_pages_kept=n_kept):
            return 0, n_kept
        case StartRestore(device=device) | StartMirror(device=device):
            return 0, len(device)
        case StartPersist(positions=positions):
            return (positions[0] if positions else 0), len(positions)
        case SendWant(start=start, device=device):
            return start, len(device)
        case SendHold(prompt=prompt):
            return 0, prompt.n_pages
        case CancelRestore() | CancelPersist() | SendCommitted() | SendAborted():
            return 0, 0
        case ClosePeer() | ForgetStorage():
            return 0, 0
