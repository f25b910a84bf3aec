"""Lookups, reads and writes of runs of pages: who works on which page, and what is reported when.

All state here is guarded by the workers' condition `changed`; pages are moved outside it. Reports
are posted under it, so that their order is the order of what they say.
"""

from collections.abc import Callable
from functools import partial

from kvlift.core.ids import Ticket
from kvlift.core.landed import (
    Landed,
    LookupAnswered,
    PersistEnded,
    PrefetchEnded,
    PrefetchProgressed,
)
from kvlift.core.policy import Switch
from kvlift.effects.keyring import KeyRing
from kvlift.effects.ports import PageRun
from kvlift.effects.stores.medium import Draft, Medium
from kvlift.effects.stores.room import page_stamp_ns
from kvlift.effects.stores.workers import Piece, Workers

Post = Callable[[Landed], None]


class RunPages:
    """The keys and the stamps of a run's pages, by index in the run. Only for worker threads."""

    def __init__(self, keyring: KeyRing, run: PageRun, run_ns: int) -> None:
        self._keyring = keyring
        self._run = run
        self._run_ns = run_ns
        self.namespace = run.prompt.namespace
        self.size_bytes = len(run.prompt.tokens)
        self.n_pages = len(run.positions)
        if run.positions and max(run.positions) >= run.prompt.n_pages_full:
            raise ValueError(
                f"page {max(run.positions)} has no key: the prompt has "
                f"{run.prompt.n_pages_full} full pages"
            )

    def key(self, index: int) -> bytes:
        return self._keyring.keys(self._run.prompt, (self._run.positions[index],))[0]

    def all_keys(self) -> list[bytes]:
        return self._keyring.keys(self._run.prompt, self._run.positions)

    def stamp_ns(self, index: int) -> int:
        return page_stamp_ns(self._run_ns, self._run.positions[index])

    def refresh_ancestors(self, medium: Medium) -> None:
        """What stands before a run was used with it, from wherever it came; without this a hot
        prefix that never leaves the device would be the first that storage evicts."""
        if not self._run.positions:
            return
        before = range(min(self._run.positions))
        keys = self._keyring.keys(self._run.prompt, before)
        medium.refresh(keys, [page_stamp_ns(self._run_ns, position) for position in before])


class LookupRun:
    """Counts the pages that are there, to the first hole."""

    def __init__(
        self, workers: Workers, post: Post, medium: Medium, ticket: Ticket, pages: RunPages
    ) -> None:
        self._workers = workers
        self._post = post
        self._medium = medium
        self._ticket = ticket
        self._pages = pages
        self.size_bytes = pages.size_bytes
        self._is_taken = False

    @property
    def is_spent(self) -> bool:
        return self._is_taken

    def take(self) -> Piece | None:
        if self._is_taken:
            return None
        self._is_taken = True
        return self._answer

    def stop(self) -> None:
        """Answer that nothing is there, unless a worker is at it."""
        with self._workers.changed:
            if not self._is_taken:
                self._is_taken = True
                self._post(LookupAnswered(self._ticket, 0))

    def _answer(self) -> None:
        n_pages = 0
        for key in self._pages.all_keys():
            if not self._medium.has(key):
                break
            n_pages += 1
        self._post(LookupAnswered(self._ticket, n_pages))


class ReadRun:
    """Reads pages into host pages, several at a time; progress counts them in order."""

    def __init__(
        self,
        workers: Workers,
        post: Post,
        medium: Medium,
        ticket: Ticket,
        pages: RunPages,
        place: Callable[[int], memoryview],
    ) -> None:
        self._workers = workers
        self._post = post
        self._medium = medium
        self._ticket = ticket
        self._pages = pages
        self._place = place
        self._n_begun = 0
        self._n_running = 0
        self._n_good = 0
        self._good_ahead: set[int] = set()
        self._is_stopped = False
        self.has_ended = False

    @property
    def is_spent(self) -> bool:
        return self._is_stopped or self._n_begun == self._pages.n_pages

    def take(self) -> Piece | None:
        if self.is_spent:
            return None
        index = self._n_begun
        self._n_begun += 1
        self._n_running += 1
        return partial(self._read, index)

    def stop(self) -> None:
        """Begin no further page. What is being read still counts when it lands."""
        with self._workers.changed:
            self._is_stopped = True
            self._settle()

    def _read(self, index: int) -> None:
        is_good = self._medium.read(
            self._pages.key(index),
            self._pages.namespace,
            self._place(index),
            self._pages.stamp_ns(index),
        )
        with self._workers.changed:
            self._n_running -= 1
            if not is_good:
                self._is_stopped = True
            else:
                self._good_ahead.add(index)
            before = self._n_good
            while self._n_good in self._good_ahead:
                self._good_ahead.remove(self._n_good)
                self._n_good += 1
            if not self._settle() and self._n_good > before:
                self._post(PrefetchProgressed(self._ticket, self._n_good))

    def _settle(self) -> bool:
        if self.is_spent and not self._n_running and not self.has_ended:
            self.has_ended = True
            self._post(PrefetchEnded(self._ticket, self._n_good))
        return self.has_ended


class WriteRun:
    """Stores pages: room is taken in order, pages are written several at a time, and made visible
    in order, so that no page can be found before those that stand before it in the run."""

    def __init__(
        self,
        workers: Workers,
        post: Post,
        medium: Medium,
        ticket: Ticket,
        pages: RunPages,
        load: Callable[[int], memoryview],
        bounces: Switch,
    ) -> None:
        self._workers = workers
        self._post = post
        self._medium = medium
        self._ticket = ticket
        self._pages = pages
        self._load = load
        self._bounces = bounces is Switch.ON
        self._n_loading = 0
        self._is_let_go = False
        self._n_begun = 0
        self._n_running = 0
        self._n_stored = 0
        self._written: dict[int, Draft] = {}
        self._is_reserving = False
        self._is_publishing = False
        self._is_stopped = False
        self._is_forgotten = False
        self.has_ended = False

    @property
    def is_spent(self) -> bool:
        return self._is_stopped or self._n_begun == self._pages.n_pages

    def take(self) -> Piece | None:
        if self.is_spent or self._is_reserving:
            return None
        index = self._n_begun
        self._n_begun += 1
        self._n_running += 1
        self._is_reserving = True
        return partial(self._store, index)

    def stop(self) -> None:
        """Begin no further page."""
        with self._workers.changed:
            self._is_stopped = True
            self._settle()

    @property
    def is_at_work(self) -> bool:
        """Whether a thread may still store a page of it; also after it was let go and has ended."""
        return self._n_running > 0

    def let_go(self) -> None:
        """End as soon as no source page is being read, and read none from then on. Where pages are
        written from a bounce buffer, a write that hangs holds none of them; what it still stores
        is not counted."""
        with self._workers.changed:
            self._is_stopped = True
            self._is_let_go = self._bounces
            self._settle()

    def forget(self) -> None:
        """Begin no further page, and leave none of those that are being written."""
        with self._workers.changed:
            self._is_forgotten = True
        self.stop()

    def _store(self, index: int) -> None:
        draft = self._medium.draft(
            self._pages.key(index), self._pages.namespace, self._pages.stamp_ns(index)
        )
        with self._workers.changed:
            self._is_reserving = False
            self._workers.changed.notify_all()
        if draft is not None and not self._fill(draft, index):
            draft = None
        with self._workers.changed:
            if draft is None:
                self._is_stopped = True
            else:
                self._written[index] = draft
            if self._is_publishing:
                self._n_running -= 1  # The thread that publishes looks again before it leaves.
                return
            self._is_publishing = True
        self._publish_in_order()

    def _fill(self, draft: Draft, index: int) -> bool:
        is_written = False
        try:
            is_written = draft.fill(lambda: self._loaded(index))
        finally:
            if not is_written:
                draft.discard()
        return is_written

    def _loaded(self, index: int) -> memoryview | None:
        with self._workers.changed:
            if self._is_let_go:
                return None  # The source page may be another request's by now.
            self._n_loading += 1
        try:
            return self._load(index)
        finally:
            with self._workers.changed:
                self._n_loading -= 1
                self._settle()

    def _publish_in_order(self) -> None:
        left: list[Draft] = []
        while True:
            with self._workers.changed:
                index = self._n_stored
                draft = None if self._is_forgotten else self._written.pop(index, None)
                if draft is None:
                    self._is_publishing = False
                    self._n_running -= 1
                    left = self._left_over()
            if draft is None:
                return self._leave(left)
            is_stored = draft.publish()
            with self._workers.changed:
                if is_stored:
                    self._n_stored += 1
                else:
                    self._is_stopped = True
                is_forgotten = self._is_forgotten
            if is_stored and is_forgotten:
                self._medium.withdraw(self._pages.key(index))

    def _leave(self, left: list[Draft]) -> None:
        for draft in left:
            draft.discard()
        with self._workers.changed:
            self._settle()

    def _left_over(self) -> list[Draft]:
        """Pages that will never be in turn, once nobody works on the run any more."""
        if not self.is_spent or self._n_running:
            return []
        left = list(self._written.values())
        self._written.clear()
        return left

    def _settle(self) -> None:
        is_over = not self._n_running and not self._written
        is_let_go = self._is_let_go and not self._n_loading
        if self.is_spent and (is_over or is_let_go) and not self.has_ended:
            self.has_ended = True
            self._post(PersistEnded(self._ticket, self._n_stored))
