"""`kvlift bench NAME`: one question a bench, with its machine, its command, its ceiling."""

import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import click
from rich import box
from rich.table import Table

from kvlift.cli.benches.row import Row, machine
from kvlift.cli.output import (
    Unusable,
    end,
    fail,
    json_option,
    only_the_answer_on_stdout,
    print_json,
    table_console,
)

QUESTIONS: Final = {
    "index": "What do match, insert and evict cost, beside a memcmp of the tokens?",
    "tick": "What does a tick cost the scheduler, by requests in flight?",
    "ballot": "How long does a tick wait for agreement, beside a decode step?",
    "store": "How fast are the file store's reads and writes, beside raw O_DIRECT?",
    "copies": "How fast are copies between host and device, beside one contiguous copy?",
    "transfer": "How fast do pages come from prefill, beside a plain socket copy?",
    "ttft": "How soon is the first token there, by link rate and tiers, beside what can be?",
}
PLACE: Final = "KVLIFT_BENCH_DIR"
WITH_SMALL_SIZES: Final = ("copies", "transfer", "ttft")


SMALL: Final = (
    "--tiny: these sizes show that it works. Fixed costs are most of the time, so neither values "
    "nor ratios say how fast it is."
)


@click.command(
    epilog="Example: kvlift bench index --json > index.json",
    help="Measure one question, beside what could be.\n\n\b\n"
    + "\n".join(f"{name:9} {question}" for name, question in QUESTIONS.items())
    + "\n\nAbsolute times count on a quiet machine only; ratios are taken side by side in one run. "
    "Ends with 1 if a case could not be measured.",
)
@click.argument("name", type=click.Choice(sorted(QUESTIONS)))
@click.option("--tiny", "is_tiny", is_flag=True, help="Small sizes: checks all, measures little.")
@json_option
def bench(name: str, *, is_tiny: bool, as_json: bool) -> None:
    """One question a call; its help is made of `QUESTIONS`."""
    measure: Callable[..., list[Row]] = importlib.import_module(
        f"kvlift.cli.benches.{name}"
    ).measure
    if is_tiny and name not in WITH_SMALL_SIZES:
        raise Unusable(f"bench {name} has no small sizes: leave out --tiny")

    _check_place()

    def progress(what: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"{name}: {what}", err=True)

    with only_the_answer_on_stdout(as_json=as_json):
        rows = measure(progress, is_tiny=True) if is_tiny else measure(progress)
    answer = {
        "bench": name,
        "machine": machine(),
        "command": f"kvlift bench {name}" + (" --tiny" if is_tiny else ""),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "tiny": is_tiny,
        "rows": [row.as_json() for row in rows],
    }
    if as_json:
        print_json(answer)
    else:
        _print_table(name, rows, is_tiny=is_tiny)
    end(holds=all(row.error is None for row in rows))


def _check_place() -> None:
    """Before anything is measured: where the files of a bench are to lie."""
    place = os.environ.get(PLACE)
    if not place:
        return
    try:
        with tempfile.TemporaryDirectory(prefix="kvlift-bench-", dir=place):
            pass
    except OSError as error:
        fail(f"{PLACE}={place} can't be used ({error.strerror}): set it to a folder of yours")


def in_short(value: float) -> str:
    """Four digits, never with an exponent: 19,751, 53.3, 0.003412."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _print_table(name: str, rows: list[Row], *, is_tiny: bool) -> None:
    """Fits 80 columns: what rows say of themselves stands below the table, once."""
    told = machine()
    console = table_console()
    console.print(f"{QUESTIONS[name]}\n{told['processor']}, {told['n_cpus']} processors")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("case", overflow="fold")
    for column in ("value", "unit", "ceiling", "ratio", "better"):
        is_number = column in {"value", "ceiling", "ratio"}
        table.add_column(column, justify="right" if is_number else "left", no_wrap=True)
    for line in rows:
        ceiling = "" if line.ceiling is None else in_short(line.ceiling)
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
        better = "" if line.ratio is None else line.better
        table.add_row(line.case, in_short(line.value), line.unit, ceiling, ratio, better)
    console.print(table)
    console.print("ratio: value / ceiling, where no line below says otherwise")
    cases: dict[str, list[str]] = {}
    for line in rows:
        for note in filter(None, (line.note, line.error)):
            cases.setdefault(note, []).append(line.case)
    for note, named in cases.items():
        console.print(f"{', '.join(named)}: {note}")
    if is_tiny:
        console.print(SMALL)
