"""`kvlift bench NAME`: one question a bench, with its machine, its command, its ceiling."""

import importlib
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import click
from rich.table import Table

from kvlift.cli.benches.row import Row, machine
from kvlift.cli.output import (
    Unusable,
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
WITH_SMALL_SIZES: Final = ("copies", "transfer", "ttft")


@click.command(
    epilog="Example: kvlift bench index --json > index.json",
    help="Measure one question: " + "; ".join(f"{n}: {q}" for n, q in QUESTIONS.items()),
)
@click.argument("name", type=click.Choice(sorted(QUESTIONS)))
@click.option("--tiny", "is_tiny", is_flag=True, help="Small sizes: checks all, measures little.")
@json_option
def bench(name: str, *, is_tiny: bool, as_json: bool) -> None:
    """Absolute times count on a quiet machine only; ratios are taken side by side in one run."""
    measure: Callable[..., list[Row]] = importlib.import_module(
        f"kvlift.cli.benches.{name}"
    ).measure
    if is_tiny and name not in WITH_SMALL_SIZES:
        raise Unusable(f"bench {name} has no small sizes: leave out --tiny")

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
        "rows": [row.as_json() for row in rows],
    }
    if as_json:
        print_json(answer)
        return
    _print_table(name, rows)


def _print_table(name: str, rows: list[Row]) -> None:
    told = machine()
    console = table_console()
    console.print(f"{QUESTIONS[name]}\n{told['processor']}, {told['n_cpus']} processors")
    table = Table("case", "value", "unit", "ceiling", "ratio", "note")
    for line in rows:
        ceiling = "" if line.ceiling is None else f"{line.ceiling:g}"
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
        table.add_row(line.case, f"{line.value:g}", line.unit, ceiling, ratio, line.note)
    console.print(table)
