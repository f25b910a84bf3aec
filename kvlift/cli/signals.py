"""How Ctrl-C and SIGTERM end a command: by an exception, so that child processes and temporary
files go, too."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

from attrs import define

from kvlift.cli.output import TERMINATED

LOOK_AGAIN_S: Final = 0.05
IMPORT_S_MAX: Final = 10.0
"""An import that takes longer than this is interrupted, too."""


@define
class Ending:
    """What a signal has raised, and what becomes of it.

    Once the stack unwinds, more signals change nothing: `timeout` sends two, and so does an
    impatient hand, and the second would leave behind what the first is clearing away. But an
    exception can get lost in code that catches everything, and then the next signal counts again.
    """

    is_over: bool = False
    """Set by who has caught what was raised: what is left to do must not be disturbed."""
    _raised: BaseException | None = None
    _number: int = signal.SIGINT
    _heard_s: float | None = None

    def hear(self, number: int, frame: FrameType | None) -> None:
        """The handler of all signals; SIGALRM is our own and stands for the one that waits."""
        if self.is_over or (self._raised is not None and _is_under_way(self._raised)):
            return
        if number != signal.SIGALRM:
            self._number = number
        now_s = time.monotonic()
        if self._heard_s is None:
            self._heard_s = now_s
        if _imports(frame) and now_s - self._heard_s < IMPORT_S_MAX:
            # Compiled modules that import others (torch, numpy) drop whatever is raised in there.
            signal.setitimer(signal.ITIMER_REAL, LOOK_AGAIN_S)
            return
        self._heard_s = None
        is_ctrl_c = self._number == signal.SIGINT
        self._raised = KeyboardInterrupt() if is_ctrl_c else SystemExit(TERMINATED)
        raise self._raised


def _is_under_way(raised: BaseException) -> bool:
    """Whether what runs now runs because of it: a `finally`, an `except`, an `__exit__`."""
    error = sys.exc_info()[1]
    while error is not None and error is not raised:
        error = error.__context__
    return error is raised


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def ended_by_signals() -> Iterator[Ending]:
    """Inside, Ctrl-C raises `KeyboardInterrupt` and SIGTERM `SystemExit`, outside of imports."""
    ending = Ending()
    before: dict[int, Any] = {}
    try:
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, ending.hear)
    except ValueError:  # not the main thread: signals belong to who embeds the command
        yield ending
        return
    # A background job of a shell ignores Ctrl-C, and goes on doing so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, ending.hear)
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, ending.hear)
    try:
        yield ending
    finally:
        ending.is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
