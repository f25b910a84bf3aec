"""One ticket's conversation with its prefill node, as the decode rank keeps it. No sockets here."""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.landed import Landed, PagesArrived
from kvlift.core.prompt import Prompt


@frozen
class Wanted:
    """One want as it was asked for: the pages [start, start + n_pages)."""

    start: int
    n_pages: int
    promise: int


@define(eq=False)
class Conversation:
    """What was asked for, what has come, and whether anything may still be written.

        wanted      4 5 6 7 | 2 3         order of the asking
        arrived     4 5   7               7 is written, and counted when 6 is there
        n_arrived   2

    `revoked` is set by the tick's thread (committed, aborted) and read by the thread that writes;
    everything else belongs to the latter.
    """

    ticket: Ticket
    rid: Rid
    attempt: Attempt
    address: str
    prompt: Prompt
    revoked: bool = field(default=False, init=False)
    asked_positions: set[int] = field(factory=set, init=False)
    """Positions asked for so far; belongs to the tick's thread."""

    wants: list[Wanted] = field(factory=list, init=False)
    is_told: bool = field(default=False, init=False)
    """The node has heard the hold, so it may know of this request."""

    has_failed: bool = field(default=False, init=False)
    is_aborted: bool = field(default=False, init=False)
    is_gone: bool = field(default=False, init=False)
    """The node has let go of the request, and so far nobody needed to know."""

    has_token: bool = field(default=False, init=False)
    n_arrived: int = field(default=0, init=False)
    _order: deque[int] = field(factory=deque, init=False)
    _places: dict[int, int] = field(factory=dict, init=False)

    def want(self, wanted: Wanted, device_pages: Sequence[int]) -> None:
        self.wants.append(wanted)
        for position, device_page in enumerate(device_pages, wanted.start):
            self._order.append(position)
            self._places[position] = device_page

    @property
    def n_outstanding(self) -> int:
        return len(self._places)

    def place_of(self, position: int) -> int | None:
        """The device page that still waits for this position; None: nothing may be written."""
        if self.revoked or self.has_failed or self.is_aborted:
            return None
        return self._places.get(position)

    def written(self, position: int) -> bool:
        """The page is in its place. Whether the count in asking order has grown."""
        del self._places[position]
        before = self.n_arrived
        while self._order and self._order[0] not in self._places:
            self._order.popleft()
            self.n_arrived += 1
        return self.n_arrived > before


class Reports:
    """What the receiving thread tells the tick's thread, in the order in which it happened."""

    def __init__(self, on_landed: Callable[[], None] | None) -> None:
        self._lock = threading.Lock()
        self._reports: list[Landed] = []
        self._on_landed = on_landed

    def add(self, report: Landed) -> None:
        with self._lock:
            last = self._reports[-1] if self._reports else None
            if (
                isinstance(report, PagesArrived)
                and isinstance(last, PagesArrived)
                and last.ticket == report.ticket
            ):
                self._reports[-1] = report  # counts are cumulative: the later one says both
            else:
                self._reports.append(report)
        self.announce()

    def announce(self) -> None:
        if self._on_landed is not None:
            self._on_landed()

    def taken(self) -> list[Landed]:
        with self._lock:
            reports, self._reports = self._reports, []
        return reports
