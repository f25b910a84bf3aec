"""The store of local files: the `Store` port over a folder, with threads of its own.

Nothing here waits on the tick's thread: calls put a run in a queue, `landed()` empties another.
"""

import functools
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from kvlift.core.ids import Ticket
from kvlift.core.landed import Landed, LookupAnswered, PersistEnded, PrefetchEnded
from kvlift.core.policy import Switch
from kvlift.effects.host_pages import HostPages
from kvlift.effects.keyring import KeyRing
from kvlift.effects.ports import DeviceMemory, PageRun
from kvlift.effects.stores.file_medium import FileMedium, Fsync
from kvlift.effects.stores.folder import Folder, now_ns
from kvlift.effects.stores.page_file import HEADER_BYTES, Caching
from kvlift.effects.stores.room import Room
from kvlift.effects.stores.runs import LookupRun, ReadRun, RunPages, WriteRun
from kvlift.effects.stores.workers import Care, Once, Urgency, Workers

CLOSE_WAIT_SHARE = 0.8
"""The part of the time for closing in which running writes may still end by themselves."""

CARE_MAX = 256
"""Notes of use that may wait; more are left out."""

LOOKUP_BYTES_MAX = 1 << 30
"""Prompts whose lookups may wait: storage that hangs must not keep those of requests that end."""


class FileStore:
    """Pages as files, each private (0600), verified when read, written atomically.

    Several processes may share the folder, and a restart finds what was there. All of them together
    hold at most `size_bytes_max` bytes (headers and files being written included; None: no bound).
    A page that is missing, damaged, foreign or of another size is a miss, from there on, and a
    damaged one is removed. Failures of the file system are reports with fewer pages and a line in
    the log of `kvlift.storage`.

    `on_landed` is called from worker threads when `landed()` has something new.
    Raises StoreRefusedError, a ValueError, for a folder that others may write to or that can't be
    used.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        host_pages: HostPages,
        device_memory: DeviceMemory | None = None,
        *,
        n_threads: int = 4,
        size_bytes_max: int | None = None,
        fsync: Fsync = Fsync.OFF,
        caching: Caching = Caching.AUTO,
        trust_folder: Switch = Switch.OFF,
        keyring: KeyRing | None = None,
        on_landed: Callable[[], None] | None = None,
    ) -> None:
        page_bytes = host_pages.page_bytes
        _check_sizes(page_bytes, device_memory, n_threads, size_bytes_max)
        place = Folder(Path(folder).absolute())
        place.create(trust_folder)
        self._host_pages = host_pages
        self._device_memory = device_memory
        self._keyring = keyring if keyring is not None else KeyRing()
        self._on_landed = on_landed
        self._reports: deque[Landed] = deque()
        self._runs: dict[Ticket, LookupRun | ReadRun | WriteRun] = {}
        self._let_go: list[WriteRun] = []
        self._lookup_bytes = 0
        self._is_closed = False
        self._bounce = _Bounce(page_bytes)
        self._medium = FileMedium(place, Room(place, size_bytes_max), page_bytes, fsync, caching)
        self._workers = Workers(n_threads, "kvlift-store", self._wake)
        self._workers.add(Urgency.CARE, Care(self._medium.collect_orphans))

    def start_lookup(self, ticket: Ticket, run: PageRun) -> None:
        pages = self._pages(run)
        if self._is_refused(LookupAnswered(ticket, 0)):
            return
        if self._lookup_bytes >= LOOKUP_BYTES_MAX:
            self._medium.weather.tell("looking for pages", "too many lookups are not answered")
            self._answer(LookupAnswered(ticket, 0))
            return
        lookup = LookupRun(self._workers, self._post, self._medium, ticket, pages)
        self._lookup_bytes += lookup.size_bytes
        self._runs[ticket] = lookup
        self._workers.add(Urgency.LOOKUP, lookup)

    def start_prefetch(self, ticket: Ticket, run: PageRun, host_pages: Sequence[int]) -> None:
        pages, places = self._pages(run), _checked(host_pages, run, self._host_pages.n_pages)
        if self._is_refused(PrefetchEnded(ticket, 0)):
            return
        read = ReadRun(
            self._workers,
            self._post,
            self._medium,
            ticket,
            pages,
            lambda index: self._host_pages.page_view(places[index]),
        )
        self._runs[ticket] = read
        self._workers.add(Urgency.READ, read)
        self._refresh(pages)
        if not places:
            read.stop()
            self._wake()

    def cancel_prefetch(self, ticket: Ticket) -> None:
        run = self._runs.get(ticket)
        if isinstance(run, ReadRun):
            run.stop()
            self._wake()

    def cancel_persist(self, ticket: Ticket) -> None:
        run = self._runs.get(ticket)
        if isinstance(run, WriteRun):
            run.let_go()
            # It may be answered now, and store a page later: a flush must still reach it.
            self._let_go = [one for one in self._let_go if one.is_at_work] + [run]
            self._wake()

    def start_persist(self, ticket: Ticket, run: PageRun, host_pages: Sequence[int]) -> None:
        places = _checked(host_pages, run, self._host_pages.n_pages)
        self._start_write(
            ticket, run, lambda index: self._host_pages.page_view(places[index]), Switch.OFF
        )

    def start_persist_device(
        self, ticket: Ticket, run: PageRun, device_pages: Sequence[int]
    ) -> None:
        memory = self._device_memory
        if memory is None:
            raise ValueError("this store was made without device memory: it can't read its pages")
        places = _checked(device_pages, run, memory.n_pages)

        def load(index: int) -> memoryview:
            memory.read_page(places[index], self._bounce.view)
            return self._bounce.view

        self._start_write(ticket, run, load, Switch.ON)

    def forget_all(self) -> None:
        """Also ends writes that are under way; none of their pages stays. Pages that other
        processes write after this call stay."""
        if self._is_closed:
            return
        for run in (*self._runs.values(), *self._let_go):
            if isinstance(run, WriteRun):
                run.forget()
        self._medium.forget_known()
        self._workers.add(Urgency.FORGET, Once(functools.partial(self._medium.forget, now_ns())))
        self._wake()

    def landed(self) -> list[Landed]:
        self._workers.raise_bug()
        reports: list[Landed] = []
        while self._reports:
            report = self._reports.popleft()
            reports.append(report)
            if isinstance(report, LookupAnswered | PrefetchEnded | PersistEnded):
                run = self._runs.pop(report.ticket, None)
                if isinstance(run, LookupRun):
                    self._lookup_bytes -= run.size_bytes
        return reports

    def close(self, deadline_s: float) -> bool:
        """Reads and lookups are given up; writes go on until the deadline. Then False if a thread
        still runs: host pages must stay mapped. What was started is answered in any case where
        True is returned, and what is started later is answered with no pages."""
        until = time.monotonic() + deadline_s
        self._is_closed = True
        for run in list(self._runs.values()):
            if not isinstance(run, WriteRun):
                run.stop()
        self._workers.wait_idle(CLOSE_WAIT_SHARE * deadline_s)
        for run in list(self._runs.values()):
            run.stop()
        has_ended = self._workers.end(max(0.0, until - time.monotonic()))
        self._wake()
        return has_ended

    def _start_write(
        self, ticket: Ticket, run: PageRun, load: Callable[[int], memoryview], bounces: Switch
    ) -> None:
        pages = self._pages(run)
        if self._is_refused(PersistEnded(ticket, 0)):
            return
        write = WriteRun(self._workers, self._post, self._medium, ticket, pages, load, bounces)
        self._runs[ticket] = write
        self._workers.add(Urgency.WRITE, write)
        self._refresh(pages)
        if not run.positions:
            write.stop()
            self._wake()

    def _pages(self, run: PageRun) -> RunPages:
        return RunPages(self._keyring, run, now_ns())

    def _refresh(self, pages: RunPages) -> None:
        if self._workers.n_waiting(Urgency.CARE) < CARE_MAX:
            refresh = functools.partial(pages.refresh_ancestors, self._medium)
            self._workers.add(Urgency.CARE, Care(refresh))

    def _is_refused(self, answer: Landed) -> bool:
        if self._is_closed:
            self._answer(answer)
        return self._is_closed

    def _answer(self, answer: Landed) -> None:
        self._post(answer)
        self._wake()

    def _post(self, report: Landed) -> None:
        self._reports.append(report)

    def _wake(self) -> None:
        if self._on_landed is not None and (self._reports or self._workers.has_bug):
            self._on_landed()


class _Bounce(threading.local):
    """A page of plain, aligned memory for each worker that writes from the device."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._view: memoryview | None = None

    @property
    def view(self) -> memoryview:
        if self._view is None:
            self._view = memoryview(mmap.mmap(-1, self._page_bytes))
        return self._view


def _checked(places: Sequence[int], run: PageRun, n_pages: int) -> tuple[int, ...]:
    if len(places) != len(run.positions):
        raise ValueError(f"{len(run.positions)} pages of a prompt for {len(places)} places")
    if places and not 0 <= min(places) <= max(places) < n_pages:
        raise ValueError(f"places {min(places)}..{max(places)} are not all in 0..{n_pages - 1}")
    return tuple(places)


def _check_sizes(
    page_bytes: int, device: DeviceMemory | None, n_threads: int, size_bytes_max: int | None
) -> None:
    if n_threads < 1:
        raise ValueError(f"a store needs at least 1 thread, not {n_threads}")
    if device is not None and device.page_bytes != page_bytes:
        raise ValueError(
            f"host pages have {page_bytes} bytes and device pages {device.page_bytes}: "
            "make the host pool with the page size of the device"
        )
    if size_bytes_max is not None and size_bytes_max < HEADER_BYTES + page_bytes:
        raise ValueError(
            f"a store of {size_bytes_max} bytes can't hold one page, which takes "
            f"{HEADER_BYTES + page_bytes}: raise the size or leave the store out"
        )
