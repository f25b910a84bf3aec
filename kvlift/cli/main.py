"""The command `kvlift`: finds its subcommands, and turns every end into one of the exit codes.

Subcommands are modules of this package with a click command of the same name. They are imported
when they are called, so that `kvlift --help` need not wait for torch.
"""

import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any, Final

import click

from kvlift.cli.output import INTERRUPTED, TERMINATED

BROKEN_PIPE: Final = 141
"""As a shell reports a program that SIGPIPE ended: neither a success nor a finding."""

SUMMARIES: Final = {
    "demo": "Play conversations over all tiers in real processes and compare.",
    "serve": "Run the reference worker behind HTTP.",
    "story": "Run stories: small situations under a manual clock.",
    "check": "Explore small worlds exhaustively on the real core.",
    "simulate": "Run seeded simulations of the whole runtime with faults.",
    "plan": "Plan capacity: replay a trace in simulated time.",
    "bench": "Measure one question and compare it with its ceiling.",
    "replay": "Send a journal through the core again and compare decisions.",
    "explain": "Tell the life of one request of a journal in plain words.",
    "draw": "Print the drawings of the manual from the code.",
    "doctor": "Say what works on this machine and how to get what is missing.",
    "store": "Look after a file store: ls, stat, verify, gc, clear.",
}
"""In the order of the help. A command whose module is not installed is not offered."""


class LazyGroup(click.Group):
    """Imports a subcommand when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in SUMMARIES if importlib.util.find_spec(f"kvlift.cli.{name}")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = getattr(importlib.import_module(f"kvlift.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command), f"kvlift.cli.{cmd_name} has no {cmd_name}"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, SUMMARIES[name]) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows or [("(none)", "This installation has no commands.")])


def _print_version(ctx: click.Context, _param: click.Parameter, value: object) -> None:
    if not value or ctx.resilient_parsing:
        return
    try:
        click.echo(f"kvlift {version('kvlift')}")
    except PackageNotFoundError:
        click.echo("kvlift (run from its source folder, not installed)")
    ctx.exit()


@click.group(name="kvlift", cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Print the version.",
)
def kvlift() -> None:
    """Decode-side tiered KV cache for prefill/decode disaggregated LLM serving.

    Example: kvlift demo
    """


def main(args: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Errors of the call are one line each."""
    with _terminated_like_interrupted():
        try:
            code = kvlift.main(args=args, prog_name="kvlift", standalone_mode=False)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message())
            return 0
        except click.ClickException as error:
            click.echo(f"kvlift: {_in_one_line(error)}", err=True)
            return error.exit_code
        except (click.Abort, KeyboardInterrupt):
            click.echo("kvlift: interrupted", err=True)
            return INTERRUPTED
        except BrokenPipeError:
            # The reader of our output has gone (`kvlift ... | head`); nothing is left to say, and
            # the interpreter must not complain when it flushes at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
    return code if isinstance(code, int) else 0


def _in_one_line(error: click.ClickException) -> str:
    line = " ".join(error.format_message().split())
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{line} (see `{error.ctx.command_path} --help`)"
    return line


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM unwinds the stack like Ctrl-C, so that child processes and temporary files go, too.

    Only the first of these signals counts: `timeout` sends two, and so does an impatient hand, and
    the second would leave behind what the first is clearing away."""
    before: dict[int, Any] = {}

    def unwind(number: int, _frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(TERMINATED)

    try:
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, unwind)
        # A background job of a shell ignores Ctrl-C, and goes on doing so.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            before[signal.SIGINT] = signal.signal(signal.SIGINT, unwind)
    except ValueError:  # not the main thread: signals belong to who embeds the command
        yield
        return
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
