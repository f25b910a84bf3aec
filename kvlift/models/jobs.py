"""Runs jobs in processes of their own, a few at a time, and hears how they get on."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event, Lock
from typing import Self

import msgspec
from attrs import define, field

from kvlift.models.explore import Progress
from kvlift.models.worker import Job, Line, Result


class WorkerFailed(Exception):
    """A worker ended without a result; the message has the end of what it said."""


@define
class Jobs:
    """Worker processes, `n_processes` at a time. `with` it, so that none is left behind.

    `on_progress` is called from other threads.
    """

    n_processes: int
    on_progress: Callable[[Job, Progress], None]
    _running: set["subprocess.Popen[bytes]"] = field(factory=set, init=False)
    _lock: Lock = field(factory=Lock, init=False)
    _is_closed: bool = field(default=False, init=False)
    interrupted: Event = field(factory=Event, init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers; jobs that have not begun never will."""
        with self._lock:
            self._is_closed = True
            running = list(self._running)
        for process in running:
            process.kill()
            process.wait()

    def run(self, jobs: Sequence[Job], on_result: Callable[[Job, Result], None]) -> None:
        """All jobs, in order. Raises WorkerFailed for the first that fails and ends the others.

        At an interrupt the workers end where they are, and `on_result` is given what they have
        until then; jobs that have not begun are left out."""
        with ThreadPoolExecutor(max_workers=self.n_processes) as threads:
            try:
                waiting = [(job, threads.submit(self._run_one, job)) for job in jobs]
                try:
                    self._hand_on(waiting, on_result)
                except KeyboardInterrupt:
                    self.interrupt()
                    self._hand_on(waiting, on_result)
            except BaseException:
                self.close()
                raise

    def interrupt(self) -> None:
        """Begin no more jobs, and ask the workers for what they have so far."""
        with self._lock:
            self.interrupted.set()
            running = list(self._running)
        for process in running:
            process.send_signal(signal.SIGINT)

    def _hand_on(
        self,
        waiting: list[tuple[Job, "Future[Result | None]"]],
        on_result: Callable[[Job, Result], None],
    ) -> None:
        """Results in the order of the jobs; what was handed on is taken from `waiting`."""
        while waiting:
            job, future = waiting[0]
            result = future.result()
            waiting.pop(0)
            if result is not None:
                on_result(job, result)

    def _run_one(self, job: Job) -> Result | None:
        with tempfile.TemporaryFile(mode="w+") as complaints:
            with self._lock:
                if self.interrupted.is_set():
                    return None
                if self._is_closed:
                    raise WorkerFailed(f"world {job.world} was not explored: the check was ended")
                process = subprocess.Popen(
                    [sys.executable, "-m", "kvlift.models.worker", msgspec.json.encode(job)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=complaints,
                )
                self._running.add(process)
            try:
                result = self._heard(process, job)
            finally:
                process.kill()
                process.wait()
                with self._lock:
                    self._running.discard(process)
            if result is None and self.interrupted.is_set():
                return None
            if result is None:
                complaints.seek(0)
                last = complaints.read().strip().splitlines()[-1:]
                why = last[0] if last else f"its process ended with code {process.returncode}"
                raise WorkerFailed(f"world {job.world} was not explored: {why}")
            return result

    def _heard(self, process: "subprocess.Popen[bytes]", job: Job) -> Result | None:
        """What the worker says, to its end."""
        assert process.stdout is not None
        result = None
        for text in process.stdout:
            line = msgspec.json.decode(text, type=Line)
            if line.progress is not None:
                self.on_progress(job, line.progress)
            result = line.result
        return result
