"""`kvlift replay`: a recorded journal through the core again."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from itertools import chain
from pathlib import Path

import click
import msgspec

from kvlift.cli.output import end, fail, json_option, print_json, say
from kvlift.core.agreed import Agreed
from kvlift.core.counts import device_counts, host_counts
from kvlift.runtime.journal_file import earlier
from kvlift.runtime.journal_read import JournalError, file_lines, header_in
from kvlift.runtime.perfetto import trace
from kvlift.runtime.replay import ReplayResult
from kvlift.runtime.replay import replay as replayed


def parts_of(journal: Path) -> list[Path]:
    """The files of one journal up to this one, the first part first. Raises `OSError`."""
    header = header_in(journal)
    paths = [journal]
    while header is not None and header.part > 1:
        before = _before(paths[0])
        older = header_in(before) if before.exists() else None
        is_next = older is not None and older.begun_ns == header.begun_ns
        if older is None or not is_next or older.part != header.part - 1:
            break
        paths.insert(0, before)
        header = older
    return paths


def _before(path: Path) -> Path:
    """`run.ndjson.1` for `run.ndjson`, `run.ndjson.3` for `run.ndjson.2`."""
    stem, _dot, number = path.name.rpartition(".")
    if number.isdecimal() and stem:
        return path.with_name(f"{stem}.{int(number) + 1}")
    return earlier(path, 1)


def _lines_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file_lines(file)


@contextmanager
def journal_lines(journal: Path) -> Iterator[Iterator[bytes]]:
    """The lines of a journal; whatever is wrong with it ends the command with one sentence.

    Of one that has grown beyond a file, the earlier parts that are still there come first."""
    try:
        yield chain.from_iterable(_lines_of(path) for path in parts_of(journal))
    except OSError as error:
        fail(f"{journal}: {error.strerror}; {_instead_of(journal)}")
    except JournalError as error:
        fail(f"{journal}, {error}")


def _instead_of(journal: Path) -> str:
    """With several ranks `run.ndjson` has become `run.rank0.ndjson`, and so on."""
    with suppress(OSError):
        of_ranks = sorted(
            journal.parent.glob(f"{escape(journal.stem)}.rank*{escape(journal.suffix)}")
        )
        if of_ranks and not journal.exists():
            return f"each rank has a journal of its own, as {of_ranks[0]}"
    return "name a journal that can be read"


@click.command("replay")
@click.argument("journal", type=click.Path(path_type=Path))
@click.option("--upto", type=click.IntRange(min=0), help="Stop after this tick and show the state.")
@click.option(
    "--perfetto",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a trace for ui.perfetto.dev or chrome://tracing to this file.",
)
@json_option
def replay(journal: Path, *, upto: int | None, perfetto: Path | None, as_json: bool) -> None:
    """Send a recorded journal through the core again: the same decisions, or the first difference.

    A journal holds prompts and answers as tokens: treat it as such.

    Ends with 0 if all decisions are the same, 1 at a difference, 2 if the journal can't be used.

    \b
    Example: kvlift replay run.ndjson --perfetto run.trace.json
    """
    with journal_lines(journal) as lines:
        if perfetto is not None:
            _refuse_over_journal(perfetto, journal)
        result = replayed(lines, upto)
    if perfetto is not None:
        with journal_lines(journal) as lines:
            _write(perfetto, msgspec.json.encode(trace(lines, upto)))
    if as_json:
        print_json(
            {
                "ticks": result.ticks,
                "requests": result.requests,
                "identical": result.identical,
                "first_difference": result.first_difference,
                "raised": result.raised,
            }
        )
    else:
        _print(result, show_state=upto is not None)
    if result.is_cut:
        say(f"kvlift: {journal} ends in half a line, which was left out")
    end(holds=result.identical)


def _print(result: ReplayResult, *, show_state: bool) -> None:
    click.echo(f"{result.ticks} ticks, {result.requests} requests replayed")
    if result.identical:
        click.echo("all decisions are the same")
    else:
        click.echo(f"first difference: {result.first_difference}")
    if result.raised is not None:
        click.echo(result.raised)
    if show_state and result.last is not None:
        _print_state(result.last)


def _print_state(agreed: Agreed) -> None:
    click.echo(f"after tick {agreed.tick}, digest {agreed.digest.hex()}:")
    for name, counts in (("device", device_counts(agreed)), ("host", host_counts(agreed))):
        click.echo(
            f"  {name}: {counts.free} free, {counts.cached} cached, {counts.owned} owned,"
            f" {counts.reserved} reserved, {counts.draining} draining"
        )
    for request in agreed.requests.values():
        phase = type(request.phase).__name__.lower()
        click.echo(f"  {request.rid!r} (attempt {request.attempt}): {phase}")


def _refuse_over_journal(perfetto: Path, journal: Path) -> None:
    """A journal is all that is left of a run. Raises `OSError`."""
    if perfetto.exists() and any(perfetto.samefile(part) for part in parts_of(journal)):
        fail(f"{perfetto} is the journal itself: name another file for the trace")


def _write(path: Path, data: bytes) -> None:
    """Private, since it names requests."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except OSError as error:
        fail(f"{path}: {error.strerror}; name a file that can be written")
