"""What the host scheduler hands to a tick: the same list, in the same order, on every rank."""

from typing import TypeAlias

from attrs import field, frozen

from kvlift.core.ids import Rid
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier


@frozen(kw_only=True)
class Submit:
    """`peer` empty: there is none, the host computes what no tier has.

    `n_pages_given`: leading pages that the host's own cache has on the device, in places that it
    names when it lends places for the others (`device_tier` off)."""

    rid: Rid
    prompt: Prompt
    peer: str
    priority: int = 0
    n_pages_output: int = 0
    n_pages_given: int = 0


@frozen
class Abort:
    rid: Rid


@frozen
class Run:
    rid: Rid


@frozen
class Finish:
    """`output`: every sampled token, the first included, as little-endian int32."""

    rid: Rid
    output: bytes = field(repr=False)


@frozen
class Retract:
    """`output` as in `Finish`: what has been sampled so far."""

    rid: Rid
    output: bytes = field(repr=False)


@frozen
class Resume:
    rid: Rid


@frozen
class Flush:
    tier: Tier


@frozen
class DetachStorage:
    pass


@frozen
class AttachStorage:
    pass


Submission: TypeAlias = (
    Submit | Abort | Run | Finish | Retract | Resume | Flush | DetachStorage | AttachStorage
)
