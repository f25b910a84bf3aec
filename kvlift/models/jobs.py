"""Runs jobs in processes of their own, a few at a time, and hears how they get on."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
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
        """All jobs, in order. Raises WorkerFailed for the first that fails and ends the others."""
        with ThreadPoolExecutor(max_workers=self.n_processes) as threads:
            try:
                waiting = [threads.submit(self._run_one, job) for job in jobs]
                for job, result in zip(jobs, waiting, strict=True):
                    on_result(job, result.result())
            except BaseException:
                self.close()
                raise

    def _run_one(self, job: Job) -> Result:
        with tempfile.TemporaryFile(mode="w+") as complaints:
            with self._lock:
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
