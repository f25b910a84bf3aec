"""The command `kvlift`: finds its subcommands, and turns every end into one of the exit codes.

Subcommands are modules of this package with a click command of the same name. They are imported
when they are called, so that `kvlift --help` need not wait for torch.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import click

from kvlift.cli.output import FULL, INTERRUPTED, UNUSABLE, say
from kvlift.cli.signals import ended_by_signals

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


class ReaderGone(Exception):
    """Nobody reads our output any more. click would make exit code 1 of it: that of a finding."""


class LazyGroup(click.Group):
    """Imports a subcommand when it is called."""

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with _reader_gone():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _reader_gone():
            return super().invoke(ctx)

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


@contextmanager
def _reader_gone() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error


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
    _open_what_is_closed()
    with ended_by_signals() as ending:
        try:
            code = kvlift.main(args=args, prog_name="kvlift", standalone_mode=False)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message())
            return 0
        except click.ClickException as error:
            say(f"kvlift: {_in_one_line(error)}")
            return error.exit_code
        except (click.Abort, KeyboardInterrupt):
            ending.is_over = True
            say("kvlift: interrupted")
            return INTERRUPTED
        except ReaderGone:
            return _without_a_reader()
        except SystemExit as end:
            if isinstance(end.__context__, BrokenPipeError):  # rich ends like that
                return _without_a_reader()
            raise
        except OSError as error:
            if error.errno not in FULL:
                raise
            say(f"kvlift: {error.strerror}: make room for the output and for temporary files")
            return UNUSABLE
    return code if isinstance(code, int) else 0


def _open_what_is_closed() -> None:
    """A program that is started with `>&-` or `2>&-` has no such stream at all in Python."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - to the end
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - to the end


def _without_a_reader() -> int:
    """The reader of our output has gone (`kvlift ... | head`): nothing is left to say, and the
    interpreter must not complain when it flushes at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


def _in_one_line(error: click.ClickException) -> str:
    line = " ".join(error.format_message().split())
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{line} (see `{error.ctx.command_path} --help`)"
    return line
