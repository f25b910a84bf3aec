"""A request's plan: a partition of its pages by source, and the one way in which it changes.

    pages   0 ....... device ..... shared ...... host ....... storage ............ n
            | pinned   | another    | restore     | prefetch   | transfer          |
            | on the   | request    | host to     | storage to | from the prefill  |
            | device   | brings it  | device      | host, then | node              |
            |          |            |             | restore    |                   |

Every failure, shortfall or deadline does one thing: it moves a boundary to the left (`cut_at`), and
the peer is asked for what lies to the right of it.
"""

from attrs import evolve, frozen

from kvlift.core.ids import DeviceHandle, HostHandle, Ticket
from kvlift.core.tier import Source


@frozen(kw_only=True)
class Bounds:
    """Where each source ends, in pages; never decreasing from left to right."""

    device: int
    shared: int
    host: int
    storage: int

    def cut_at(self, page: int) -> "Bounds":
        """The cached prefix ends at `page` now. Pages that are pinned on the device are safe."""
        end = max(page, self.device)
        return Bounds(
            device=self.device,
            shared=min(self.shared, end),
            host=min(self.host, end),
            storage=min(self.storage, end),
        )


@frozen(kw_only=True)
class Plan:
    """`promise` is the number of pages that the peer was last told not to send.

    `rest` is where the pages behind the last boundary come from: the peer, or, for a request that
    was retracted, a new computation by the host scheduler.
    """

    bounds: Bounds
    n_pages: int
    promise: int
    rest: Source = Source.PEER

    def n_pages_by_source(self) -> dict[Source, int]:
        """Shared pages count as device: they are pinned there, not copied, when they land."""
        b = self.bounds
        counts = {
            Source.DEVICE: b.shared,
            Source.HOST: b.host - b.shared,
            Source.STORAGE: b.storage - b.host,
            Source.PEER: 0,
            Source.RECOMPUTE: 0,
        }
        counts[self.rest] = self.n_pages - b.storage
        return counts


@frozen(kw_only=True)
class Lease:
    """Device pages of a request: [0, n_shared) are pinned in the index, `own` are those behind."""

    n_shared: int
    own: tuple[DeviceHandle, ...]

    def pages(self, start: int, stop: int) -> tuple[DeviceHandle, ...]:
        """Own handles of the pages [start, stop)."""
        return self.own[start - self.n_shared : stop - self.n_shared]


@frozen(kw_only=True)
class Part:
    """The pages [start, stop) on their way from HOST or STORAGE to the device.

    `copy` and `read` are open tickets, or None when that work has ended on all ranks. `n_good` is
    how many of its pages can still be believed, `n_landed` how many have been restored. `host` are
    host pages of its own (of a read, or a private last page); without them, those of the index are
    pinned instead. `host_epoch` is
    the flush count at the start: what began before a flush is not kept after it.
    """

    source: Source
    start: int
    stop: int
    n_good: int
    copy: Ticket | None
    read: Ticket | None = None
    host: tuple[HostHandle, ...] = ()
    n_landed: int = 0
    host_epoch: int = 0


@frozen(kw_only=True)
class Follow:
    """The pages [lease.n_shared, stop) are being brought by another request."""

    leader: int
    stop: int


@frozen
class Span:
    """The pages [start, stop)."""

    start: int
    stop: int

    @property
    def n_pages(self) -> int:
        return self.stop - self.start


def spans_outside(start: int, stop: int, taken: tuple[Span, ...]) -> tuple[Span, ...]:
    """What of [start, stop) no span in `taken` covers, from left to right."""
    free: list[Span] = []
    page = start
    for span in sorted(taken, key=lambda s: (s.start, s.stop)):
        if span.start > page:
            free.append(Span(page, min(span.start, stop)))
        page = max(page, span.stop)
        if page >= stop:
            break
    if page < stop:
        free.append(Span(page, stop))
    return tuple(span for span in free if span.n_pages > 0)


def spans_arrived(wanted: tuple[Span, ...], n_arrived: int) -> tuple[Span, ...]:
    """The spans that the first `n_arrived` pages of all wants cover."""
    arrived: list[Span] = []
    left = n_arrived
    for span in wanted:
        n_here = min(left, span.n_pages)
        if n_here > 0:
            arrived.append(Span(span.start, span.start + n_here))
        left -= n_here
    return tuple(arrived)


def with_own(lease: Lease, page: int, handles: tuple[DeviceHandle, ...]) -> Lease:
    """The lease with other handles at the pages [page, page + len(handles))."""
    at = page - lease.n_shared
    return evolve(lease, own=lease.own[:at] + handles + lease.own[at + len(handles) :])
