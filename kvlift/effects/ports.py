"""What kvlift needs of the world, as protocols. Real and simulated ports pass the same suites.

Rules that hold for every port:

- `start_*` and `send_*` return at once; what they start answers later, from `landed()`.
- `landed()` is called on the tick's thread, never blocks, and returns reports in the order in
  which things ended. Weather (a missing page, a dead peer) is a report, never an exception.
- A ticket is answered at most once with an ending; reports after it are legal and ignored.
- Physical pages are plain ints: `0 <= page < capacity` of their tier on this rank.
"""

from collections.abc import Sequence
from typing import Protocol

from attrs import frozen

from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.landed import Landed
from kvlift.core.prompt import Prompt


@frozen
class PageRun:
    """Places of pages in a prompt; the port derives their keys (`keyring`), off the tick."""

    prompt: Prompt
    positions: tuple[int, ...]


class Copies(Protocol):
    """Copies between the device pages of the engine and the host pool, all asynchronous."""

    def start_restore(
        self,
        ticket: Ticket,
        host_pages: Sequence[int],
        device_pages: Sequence[int],
        start: int = 0,
    ) -> None:
        """Host to device. Answer: `RestoreEnded` with the same `start`.

        A restore behind a read comes in pieces, the next one when the one before it has ended."""

    def start_mirror(
        self, ticket: Ticket, device_pages: Sequence[int], host_pages: Sequence[int]
    ) -> None:
        """Device to host. Answer: `MirrorEnded`."""

    def landed(self) -> list[Landed]: ...

    def close(self, deadline_s: float) -> bool:
        """Wait for running copies; False if some still run, and then no memory was unmapped."""


class Store(Protocol):
    """Pages by key, outside this process's memory. Damaged, foreign or missing is a miss."""

    def start_lookup(self, ticket: Ticket, run: PageRun) -> None:
        """Answer: `LookupAnswered` with the pages present, counted to the first hole."""

    def start_prefetch(self, ticket: Ticket, run: PageRun, host_pages: Sequence[int]) -> None:
        """Read into host pages, in order. Answers: `PrefetchProgressed`*, then `PrefetchEnded`.

        A page that is reported is in place, verified, and not written again: it may be restored."""

    def cancel_prefetch(self, ticket: Ticket) -> None:
        """Best effort; `PrefetchEnded` still comes, and only then the host pages are let go."""

    def start_persist(self, ticket: Ticket, run: PageRun, host_pages: Sequence[int]) -> None:
        """Write host pages, in order, each atomically; a page that is there counts as written.

        Answer: `PersistEnded` with the number of leading pages that are stored."""

    def start_persist_device(
        self, ticket: Ticket, run: PageRun, device_pages: Sequence[int]
    ) -> None:
        """The same from device pages, through a bounce buffer of the store's own."""

    def cancel_persist(self, ticket: Ticket) -> None:
        """For a write from the device: begin no further page, and answer `PersistEnded` as soon as
        no device page is being read, even where a write hangs. Of other writes: best effort."""

    def forget_all(self) -> None:
        """Drop every page that this store holds; asynchronous, without an answer."""

    def landed(self) -> list[Landed]: ...

    def close(self, deadline_s: float) -> bool: ...


class Peers(Protocol):
    """The wire to the prefill nodes. One ticket is a request's whole conversation with its peer."""

    def send_hold(
        self, ticket: Ticket, rid: Rid, attempt: Attempt, peer: str, prompt: Prompt
    ) -> None:
        """Announce the request; the lease is renewed by heartbeat until committed or aborted.

        Answers under this ticket, at any later time: `PagesArrived` (cumulative over all wants),
        `TokenArrived`, `PeerFailed` (with a reason that names the peer), `PeerLetGo` (proof that
        nothing is written any more; follows `PeerFailed` at once when the connection is closed).
        """

    def send_want(
        self, ticket: Ticket, start: int, device_pages: Sequence[int], promise: int
    ) -> None:
        """Ask for the pages [start, start + len(device_pages)), written straight to these places.

        A second call widens; pages arrive in the order in which they were asked for.
        """

    def send_committed(self, ticket: Ticket) -> None:
        """The end of a request whose pages are all here; no answer is awaited."""

    def send_aborted(self, ticket: Ticket) -> None:
        """Answer: `PeerLetGo`, once the peer has confirmed or its connection is closed."""

    def close_peer(self, ticket: Ticket) -> None:
        """Close the connection of this ticket's peer; every open ticket on it gets `PeerFailed`
        with cause LOST (unless it had failed) and `PeerLetGo`."""

    def landed(self) -> list[Landed]: ...

    def close(self, deadline_s: float) -> bool: ...


class Ranks(Protocol):
    """The decode ranks that run in lock step. One MIN reduction a tick, never waited for early."""

    @property
    def rank(self) -> int: ...

    @property
    def n_ranks(self) -> int: ...

    def send(self, ballot: Sequence[int]) -> None:
        """Start the MIN reduction of this rank's ballot (64-bit ints, fixed length)."""

    def verdict(self) -> tuple[int, ...]:
        """The reduced vector of the last `send`. Waits for late ranks up to the deadline.

        Raises `RankLate` naming the ranks whose heartbeat is old, `RankLost` for a dead one.
        """

    def exchange(self, report: bytes) -> list[bytes]:
        """Rare second exchange, after a divergence: every rank's report, by rank."""

    def close(self) -> None: ...


class RankLate(RuntimeError):
    """A ballot's deadline passed. `ranks` names those that did not answer, as far as known."""

    def __init__(self, ranks: tuple[int, ...], deadline_s: float) -> None:
        who = ", ".join(str(rank) for rank in ranks) or "unknown"
        super().__init__(f"no verdict within {deadline_s:g} s: rank {who} is late")
        self.ranks = ranks


class RankLost(RuntimeError):
    """A rank's process or connection is gone."""

    def __init__(self, ranks: tuple[int, ...], reason: str) -> None:
        who = ", ".join(str(rank) for rank in ranks) or "unknown"
        super().__init__(f"rank {who} is lost: {reason}")
        self.ranks = ranks


class Clock(Protocol):
    def now_ns(self) -> int:
        """Monotonic nanoseconds."""


class DeviceMemory(Protocol):
    """The engine's KV memory, page-wise: one page is all layers, K and V, in host-page layout."""

    @property
    def page_bytes(self) -> int: ...

    @property
    def n_pages(self) -> int: ...

    def write_page(self, device_page: int, data: memoryview) -> None:
        """Blocking; called from the peers' receiving thread. Bytes are in place when it returns."""

    def read_page(self, device_page: int, into: memoryview) -> None:
        """Blocking; the reverse."""
