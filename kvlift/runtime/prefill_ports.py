"""Where the prefill half meets the engine that computes the KV."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from attrs import field, frozen
from attrs.validators import ge, le

from kvlift.core.ids import Rid
from kvlift.effects import wire
from kvlift.runtime.prefill_requests import How, Request

PageBuffer: TypeAlias = bytes | bytearray | memoryview


class PageSource(Protocol):
    """The engine's KV memory, as the prefill half reads it."""

    def page_bytes_for(self, rid: Rid, position: int, rank: int, n_ranks: int) -> PageBuffer:
        """The KV of one page in host-page layout: the shard of decode rank `rank` of `n_ranks`.

        Called on the node's thread, for pages that were announced by `page_ready`. The buffer is
        C-contiguous, is not copied, and stays as it is until `ended` names the request.
        """


@frozen(kw_only=True)
class Limits:
    """What may be held at a time; one more is rejected with a reason."""

    requests_max: int = field(validator=ge(1))
    tokens_bytes_max: int = field(validator=[ge(4), le(wire.TOKENS_BYTES_MAX)])
    tokens_bytes_total_max: int = field(validator=ge(4))
    send_queue_pages_max: int = field(validator=[ge(1), le(10_000)])


@frozen(kw_only=True)
class Outlet:
    """Where the desk tells the engine's side."""

    asked: Callable[[Request], None]
    ended: Callable[[Request, How], None]
