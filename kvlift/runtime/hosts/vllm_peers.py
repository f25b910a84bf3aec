"""The prefill instance as one worker sees it: the node of its own rank, and the request there.

Rank r of a decode instance speaks to rank r of the prefill instance alone, as one rank of one. So
the two scales must be equal; where they are not, the node refuses and vLLM computes.

Addresses come through the client's hands. What a node sends is kept for everybody, so a node must
know the secret; where none is shared, it must be one of this machine, as `PrefillNode` demands.
"""

import logging
from collections.abc import Sequence
from typing import Final

from attrs import define

from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.landed import Landed
from kvlift.core.prompt import Prompt
from kvlift.effects.ports import Peers
from kvlift.effects.wire import tidy
from kvlift.effects.wire_security import is_loopback

_log: Final = logging.getLogger(__name__)

_RID_AFTER = "#"
_BETWEEN = ","


def peer_words(addresses: Sequence[str], rid: str) -> str:
    """The addresses of all ranks, and the request's name there, as one word for the core."""
    return _BETWEEN.join(addresses) + _RID_AFTER + rid


@define(eq=False)
class PeersOfRank:
    """Implements `ports.Peers` by another one."""

    inner: Peers
    rank: int
    has_secret: bool

    def send_hold(
        self, ticket: Ticket, rid: Rid, attempt: Attempt, peer: str, prompt: Prompt
    ) -> None:
        addresses, _, name_there = peer.partition(_RID_AFTER)
        listed = addresses.split(_BETWEEN)
        address = listed[self.rank] if self.rank < len(listed) else ""
        if not self.has_secret and not is_loopback(address):
            _log.warning("no secret_file: %s is of another machine, not asked", tidy(address)[:64])
            address = ""  # refused, and vLLM computes
        self.inner.send_hold(ticket, Rid(name_there), attempt, address, prompt)

    def send_want(
        self, ticket: Ticket, start: int, device_pages: Sequence[int], promise: int
    ) -> None:
        self.inner.send_want(ticket, start, device_pages, promise)

    def send_committed(self, ticket: Ticket) -> None:
        self.inner.send_committed(ticket)

    def send_aborted(self, ticket: Ticket) -> None:
        self.inner.send_aborted(ticket)

    def close_peer(self, ticket: Ticket) -> None:
        self.inner.close_peer(ticket)

    def landed(self) -> list[Landed]:
        return self.inner.landed()

    def close(self, deadline_s: float) -> bool:
        return self.inner.close(deadline_s)
