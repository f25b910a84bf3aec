"""Device and host memory of one simulated rank: each page holds what its tokens say, or poison.

Nothing here is bytes. A page's value names the namespace and all tokens up to the page's end, which
is exactly what its bytes depend on, so that a page read too early, overwritten, or put at the wrong
place shows as a wrong value instead of as plausible numbers.
"""

from enum import Enum
from typing import Literal, TypeAlias

from attrs import define, field, frozen

from kvlift.core.ids import Ticket
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier


@frozen(repr=False)
class PageValue:
    """What a page holds: the KV of the last page of `tokens` (int32 bytes) in `namespace`."""

    namespace: bytes
    tokens: bytes

    def __repr__(self) -> str:
        return f"PageValue({self.namespace[:2].hex()}, {len(self.tokens) // 4} tokens)"


Content: TypeAlias = PageValue | None
"""None is poison: bytes that are no page's."""


class Mode(Enum):
    """AUTO: what was started in one tick lands before the next. HELD: it lands when told to."""

    AUTO = "auto"
    HELD = "held"


@frozen
class Access:
    """An effect in flight that may still read from, or write into, these pages of a tier."""

    ticket: Ticket
    tier: Tier
    kind: Literal["reads", "writes"]
    pages: tuple[int, ...]


def page_value(prompt: Prompt, position: int) -> PageValue:
    """What the page at `position` of this prompt must hold; its last page may be partly filled."""
    page_bytes = prompt.page_bytes()
    if position < 0 or position * page_bytes >= len(prompt.tokens):
        raise IndexError(f"page {position} is behind the end of a prompt of {prompt.n_pages} pages")
    return PageValue(prompt.namespace, prompt.tokens[: (position + 1) * page_bytes])


@define
class SimMemory:
    """The two pools of one rank, indexed by physical page."""

    n_device_pages: int
    n_host_pages: int
    device: list[Content] = field(init=False)
    host: list[Content] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.device = [None] * self.n_device_pages
        self.host = [None] * self.n_host_pages
