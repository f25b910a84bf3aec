"""The host scheduler of a world: what it does with its requests, and what it has been told.

It knows its own calls and the notices of the core, nothing else; whether the core can take a call
is the core's affair.
"""

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Final, NamedTuple

from attrs import frozen

from kvlift.core.ids import Rid
from kvlift.core.keys import Namespace
from kvlift.core.notice import BecameReady, HasEnded, Notice
from kvlift.core.phase import Outcome
from kvlift.core.prompt import Prompt, token_bytes
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
from kvlift.core.tier import Source, Tier
from kvlift.models.worlds.weather import TOKEN

PEER: Final = "p"
OTHER_TOKEN: Final = 8
"""Of an answer that is not the one that was given before."""

SCHEDULER: Final = "host scheduler"
"""Fairness class: what is ready is run, what runs is finished, what is out comes back."""

OTHER_MOVES: Final[dict[str, tuple[Submission, ...]]] = {
    "flush device": (Flush(Tier.DEVICE),),
    "flush host": (Flush(Tier.HOST),),
    "flush all": (Flush(Tier.DEVICE), Flush(Tier.HOST), Flush(Tier.STORAGE)),
    "detach storage": (DetachStorage(),),
    "attach storage": (AttachStorage(),),
}


class At(Enum):
    """Where the host stands with a request."""

    NEW = "new"
    ASKED = "asked"
    READY = "ready"
    RUNNING = "running"
    RETRACTED = "retracted"
    RESUMED = "resumed"
    DONE = "done"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def has_ended(self) -> bool:
        return self in (At.DONE, At.ABORTED, At.FAILED)


class Stand(NamedTuple):
    """`n_*`: what the host may still do. `is_warm`: pages came from the cache in this life."""

    at: At
    n_lives: int
    n_retractions: int
    n_growths: int
    is_warm: bool = False


@frozen(kw_only=True)
class Life:
    """What the host does with one request. `story`: the rest of its `prompt` line.

    `after`: the request that must have ended before this one comes. `n_lives`: how often it is
    submitted under the same name. `is_first`: it is submitted before the first tick.
    `n_output_pages`: full pages that decoding adds. `is_hasty`: the host also says of it what it
    may not say now, each for one fault. `peer`: empty where there is none. `n_pages_given`: pages
    that the host's own cache has.
    """

    rid: str
    prompt: Prompt
    story: str
    after: str = ""
    n_lives: int = 1
    is_first: bool = False
    n_output_pages: int = 0
    priority: int = 0
    may_abort: bool = False
    is_hasty: bool = False
    peer: str = PEER
    n_pages_given: int = 0
    n_retractions: int = 0
    n_growths: int = 0

    def opening(self) -> Stand:
        at = At.ASKED if self.is_first else At.NEW
        n_left = self.n_lives - self.is_first
        return Stand(at, n_left, self.n_retractions, self.n_growths)

    def submit(self) -> Submit:
        return Submit(
            rid=Rid(self.rid),
            prompt=self.prompt,
            peer=self.peer,
            priority=self.priority,
            n_pages_given=self.n_pages_given,
        )

    def output(self) -> bytes:
        """Sampled tokens, the last of which has no KV."""
        n_odd = self.prompt.n_tokens - self.prompt.n_pages_full * self.prompt.page_tokens
        n_tokens = self.n_output_pages * self.prompt.page_tokens - n_odd + 1
        return token_bytes([TOKEN] * max(1, n_tokens))


def prompt_of(*tokens: int, page_tokens: int = 2, tenant: str = "", salt: str = "") -> Prompt:
    """A small prompt; equal numbers are equal tokens."""
    namespace = Namespace(page_tokens=page_tokens, tenant=tenant, salt=salt)
    return Prompt(namespace.digest(), token_bytes(tokens), page_tokens)


@frozen(kw_only=True)
class Call:
    """What the host may say now. `grows`: pages of a growth, which is answered at once."""

    label: str
    says: tuple[Submission, ...] = ()
    life: int = -1
    then: Stand | None = None
    fair: str | None = None
    cost: int = 0
    grows: int = 0


def calls(
    lives: tuple[Life, ...], script: tuple[Stand, ...], others: tuple[str, ...], *, is_calm: bool
) -> Iterator[Call]:
    """Everything that the host may say now, each request by itself."""
    ended = {life.rid for life, stand in zip(lives, script, strict=True) if stand.at.has_ended}
    for number, (life, stand) in enumerate(zip(lives, script, strict=True)):
        may_come = not life.after or life.after in ended
        yield from _of_request(number, life, stand, is_calm=is_calm, may_come=may_come)
    for label in others:
        yield Call(label=label, says=OTHER_MOVES[label], cost=1)


def _of_request(
    number: int, life: Life, stand: Stand, *, is_calm: bool, may_come: bool
) -> Iterator[Call]:
    rid, name = Rid(life.rid), life.rid

    def call(label: str, said: Submission, then: Stand) -> Call:
        return Call(label=label, says=(said,), life=number, then=then, fair=SCHEDULER)

    if (stand.at is At.NEW or stand.at.has_ended) and stand.n_lives and may_come:
        priority = f" priority={life.priority}" if life.priority else ""
        yield Call(
            label=f"submit {name}{priority}",
            says=(life.submit(),),
            life=number,
            then=stand._replace(at=At.ASKED, n_lives=stand.n_lives - 1, is_warm=False),
            fair=SCHEDULER if is_calm else None,
        )
    if stand.at is At.READY:
        yield call(f"run {name}", Run(rid), stand._replace(at=At.RUNNING))
    if stand.at is At.RUNNING:
        output = f" output={life.n_output_pages}" if life.n_output_pages else ""
        yield call(f"finish {name}{output}", Finish(rid, life.output()), stand)
        if stand.n_retractions:
            then = stand._replace(at=At.RETRACTED, n_retractions=stand.n_retractions - 1)
            yield call(f"retract {name}", Retract(rid, life.output()), then)
        if stand.n_growths:
            then = stand._replace(n_growths=stand.n_growths - 1)
            yield Call(label=f"grow {name} 1", life=number, then=then, grows=1)
    if stand.at is At.RETRACTED:
        yield call(f"resume {name}", Resume(rid), stand._replace(at=At.RESUMED))
    if life.may_abort and stand.at is not At.NEW and not stand.at.has_ended:
        yield Call(label=f"abort {name}", says=(Abort(rid),), life=number, then=stand, cost=1)
    if life.is_hasty:
        yield from _too_hasty(number, life, stand)


def _too_hasty(number: int, life: Life, stand: Stand) -> Iterator[Call]:
    """Calls that a host which knows what it has been told would not make now."""
    rid, name = Rid(life.rid), life.rid
    is_alive = stand.at is not At.NEW and not stand.at.has_ended
    is_running, was_out = stand.at is At.RUNNING, stand.n_retractions < life.n_retractions
    other = token_bytes([OTHER_TOKEN])
    wrong: tuple[tuple[str, Submission, bool], ...] = (
        (f"submit {name}", life.submit(), is_alive),
        (f"run {name}", Run(rid), stand.at is not At.READY),
        (f"finish {name}", Finish(rid, life.output()), not is_running),
        (f"retract {name}", Retract(rid, life.output()), not is_running),
        (f"resume {name}", Resume(rid), stand.at is not At.RETRACTED),
        (f"abort {name}", Abort(rid), not is_alive),
        (f"# finish {name} with another answer", Finish(rid, other), is_running and was_out),
        (f"# retract {name} with another answer", Retract(rid, other), is_running and was_out),
    )
    for label, said, is_wrong in wrong:
        if is_wrong:
            yield Call(label=label, says=(said,), life=number, then=stand, cost=1)
    if not is_running:
        yield Call(label=f"grow {name} 1", life=number, then=stand, cost=1, grows=1)


_ENDED: Final = {
    Outcome.DONE: At.DONE,
    Outcome.ABORTED: At.ABORTED,
    Outcome.FAILED: At.FAILED,
}


def heard(
    lives: tuple[Life, ...], script: tuple[Stand, ...], notices: Iterable[Notice]
) -> tuple[Stand, ...]:
    """The script after a tick has told what became of the requests."""
    after = list(script)
    number_by_rid = {life.rid: number for number, life in enumerate(lives)}
    for notice in notices:
        if isinstance(notice, BecameReady):
            at = number_by_rid[notice.rid]
            n_from = notice.plan.n_pages_by_source()
            n_cached = n_from[Source.DEVICE] + n_from[Source.HOST] + n_from[Source.STORAGE]
            is_warm = after[at].is_warm or n_cached > 0
            after[at] = after[at]._replace(at=At.READY, is_warm=is_warm)
        elif isinstance(notice, HasEnded):
            at = number_by_rid[notice.rid]
            after[at] = after[at]._replace(at=_ENDED[notice.outcome])
    return tuple(after)
