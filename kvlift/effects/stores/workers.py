"""The threads of a store. Jobs hand out pieces of work (a page, a lookup), so that what is urgent
waits for one piece at most, and several threads can work on one run."""

import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Final, Protocol

Piece = Callable[[], None]

N_JOBS_KEPT: Final = 64
"""So many jobs of an urgency may be there before anybody looks which of them are spent."""


class Urgency(IntEnum):
    """The order in which work is taken. While there is a FORGET, nothing else is begun, so that
    what was asked after it doesn't see what was there before it."""

    FORGET = 0
    LOOKUP = 1
    READ = 2
    WRITE = 3
    CARE = 4


class Job(Protocol):
    """Both are asked under the workers' lock, and must not wait."""

    def take(self) -> Piece | None:
        """The next piece; None where there is none now."""

    @property
    def is_spent(self) -> bool:
        """Whether no piece will be handed out any more (some may still be at work)."""


class Once:
    """A job of one piece."""

    def __init__(self, piece: Piece) -> None:
        self._piece: Piece | None = piece
        self._is_done = False

    def take(self) -> Piece | None:
        piece, self._piece = self._piece, None
        return None if piece is None else lambda: self._run(piece)

    @property
    def is_spent(self) -> bool:
        return self._is_done

    def _run(self, piece: Piece) -> None:
        try:
            piece()
        finally:
            self._is_done = True


class Care(Once):
    """A job that nobody waits for: it is over for the others as soon as somebody is at it."""

    @property
    def is_spent(self) -> bool:
        return self._piece is None


class Workers:
    """`n_threads` daemon threads. `changed` is the one lock of the store's books; notify it when a
    job may have new pieces. `after_piece` is called without it, from the worker."""

    def __init__(self, n_threads: int, name: str, after_piece: Piece) -> None:
        self._after_piece = after_piece
        self.changed = threading.Condition()
        self._jobs: dict[Urgency, deque[Job]] = {urgency: deque() for urgency in Urgency}
        self._n_jobs_kept = dict.fromkeys(Urgency, N_JOBS_KEPT)
        self._n_busy = 0
        self._has_ended = False
        self._bug: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, urgency: Urgency, job: Job) -> None:
        with self.changed:
            jobs = self._jobs[urgency]
            jobs.append(job)
            if len(jobs) > self._n_jobs_kept[urgency]:
                # Workers drop them as they pass, but storage that hangs stops all workers.
                jobs = self._jobs[urgency] = deque(job for job in jobs if not job.is_spent)
                self._n_jobs_kept[urgency] = max(N_JOBS_KEPT, 2 * len(jobs))
            self.changed.notify_all()

    def n_waiting(self, urgency: Urgency) -> int:
        """About how many jobs there are."""
        return len(self._jobs[urgency])

    @property
    def has_bug(self) -> bool:
        return self._bug is not None

    def raise_bug(self) -> None:
        """Raise, on the caller's thread, what a worker could not account for."""
        bug, self._bug = self._bug, None
        if bug is not None:
            raise bug

    def wait_idle(self, deadline_s: float) -> bool:
        """Wait until every job is spent and no piece is at work; False at the deadline."""
        with self.changed:
            return self.changed.wait_for(self._is_idle, max(0.0, deadline_s))

    def end(self, deadline_s: float) -> bool:
        """Begin nothing more; whether all threads have ended by the deadline."""
        until = time.monotonic() + deadline_s
        with self.changed:
            self._has_ended = True
            self.changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (piece := self._next_piece()) is not None:
            try:
                piece()
            except Exception as bug:  # noqa: BLE001
                # Kept for the tick's thread, where a bug is seen; here it would end in silence.
                self._bug = bug
            self._after_piece()
            with self.changed:
                self._n_busy -= 1
                self.changed.notify_all()

    def _next_piece(self) -> Piece | None:
        with self.changed:
            while not self._has_ended:
                piece = self._find_piece()
                if piece is not None:
                    self._n_busy += 1
                    return piece
                self.changed.wait()
        return None

    def _find_piece(self) -> Piece | None:
        for urgency, jobs in self._jobs.items():
            while jobs and jobs[0].is_spent:
                jobs.popleft()
            for job in jobs:
                piece = job.take()
                if piece is not None:
                    return piece
            if urgency is Urgency.FORGET and jobs:
                return None
        return None

    def _is_idle(self) -> bool:
        return self._n_busy == 0 and (
            self._has_ended or all(job.is_spent for jobs in self._jobs.values() for job in jobs)
        )
