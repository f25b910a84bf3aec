"""What all commands share: where output goes, how they end, how they show that they work.

- Standard output carries the answer; with `--json` one JSON value and nothing else.
- Standard error carries progress and the one line of an error.
- Exit codes: 0 success; 1 it ran, and what it checks does not hold; 2 a wrong call or an unusable
  environment; 130 after Ctrl-C, 143 after SIGTERM; 141 where the reader of the output has gone.
"""

import errno
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, Final, NoReturn, TypeVar

import click
import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

HOLDS: Final = 0
DOES_NOT_HOLD: Final = 1
UNUSABLE: Final = 2
INTERRUPTED: Final = 130
TERMINATED: Final = 143

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Where output or a temporary file could not be written, and the place itself is all right."""

Command = TypeVar("Command", bound=Callable[..., Any])


class Unusable(click.ClickException):
    """A wrong call or an unusable environment: one sentence that says what to do, exit code 2."""

    exit_code = UNUSABLE


def json_option(command: Command) -> Command:
    """Adds `--json`; the command receives it as the keyword `as_json`."""
    option = click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Print one JSON value on standard output and nothing else there.",
    )
    return option(command)


def print_json(value: object) -> None:
    """One JSON value and a newline on standard output."""
    click.echo(msgspec.json.encode(value), file=sys.stdout)


@contextmanager
def only_the_answer_on_stdout(*, as_json: bool) -> Iterator[None]:
    """While work runs for `--json`, whatever else prints goes to standard error."""
    if not as_json:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def table_console() -> Console:
    """For people, on standard output."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty())


def progress_bar() -> Progress:
    """On standard error, and only where that is a terminal. Use it with `with`."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        disable=not sys.stderr.isatty(),
        transient=True,
    )


def say(line: str) -> None:
    """A line of progress on standard error, if anybody can be told there."""
    with suppress(OSError):
        click.echo(line, err=True)


def fail(message: str) -> NoReturn:
    """End with exit code 2 and this sentence."""
    raise Unusable(message)


def end(*, holds: bool) -> NoReturn:
    """End with exit code 0 or, if what the command checks does not hold, 1."""
    raise click.exceptions.Exit(HOLDS if holds else DOES_NOT_HOLD)
