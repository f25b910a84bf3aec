"""What the launcher and its processes say to each other: msgspec structs over private sockets."""

from typing import TypeAlias

import msgspec

from kvlift.runtime.worker.generation import Output, Request


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of everything on a channel; the tag is the class name."""


class Submitted(Message, frozen=True, kw_only=True):
    request: Request


class AbortRequested(Message, frozen=True, kw_only=True):
    rid: str


class FlushRequested(Message, frozen=True, kw_only=True):
    tiers: tuple[str, ...]


class StorageSwitched(Message, frozen=True, kw_only=True):
    """Detach storage from the driver, or attach it again."""

    is_attached: bool


class Verifying(Message, frozen=True, kw_only=True):
    """Whether restored pages are compared with recomputed ones before a request runs."""

    is_on: bool


class DamageRequested(Message, frozen=True, kw_only=True):
    """Overwrite one restored page of the next request that has one: the proof that checks bite."""


class StatsAsked(Message, frozen=True, kw_only=True):
    number: int


class ScoreAsked(Message, frozen=True, kw_only=True):
    """To prefill: log-probabilities by a plain forward, see `Engine.score`."""

    number: int
    tokens: tuple[int, ...]
    start: int


class MetricsAsked(Message, frozen=True, kw_only=True):
    number: int


class StopRequested(Message, frozen=True, kw_only=True):
    """End in good order."""


Command: TypeAlias = (
    Submitted
    | AbortRequested
    | FlushRequested
    | StorageSwitched
    | Verifying
    | DamageRequested
    | StatsAsked
    | ScoreAsked
    | MetricsAsked
    | StopRequested
)


class Beat(msgspec.Struct, frozen=True):
    """Rank 0 to the others, once an iteration: tokens of the last step, then new commands.

    Every rank accepts the tokens, obeys the commands and ticks, in this order."""

    number: int
    tokens: list[tuple[int, float]]
    commands: list[Command]


class Started(Message, frozen=True, kw_only=True):
    """A process is ready; `info` describes it in plain values."""

    info: dict[str, object]


class Delivered(Message, frozen=True, kw_only=True):
    """Outputs of one iteration."""

    outputs: list[Output]


class Answered(Message, frozen=True, kw_only=True):
    """The answer to a question by its number; `fault` instead of an answer is a sentence."""

    number: int
    value: object = None
    fault: str = ""


News: TypeAlias = Started | Delivered | Answered
