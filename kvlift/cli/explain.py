"""`kvlift explain`: one request's life in plain words."""

from pathlib import Path

import attrs
import click

from kvlift.cli.output import fail, json_option, print_json
from kvlift.cli.replay import journal_lines
from kvlift.runtime.explain import explain as explained
from kvlift.runtime.log import plain


@click.command("explain")
@click.argument("journal", type=click.Path(path_type=Path))
@click.argument("rid")
@json_option
def explain(journal: Path, rid: str, *, as_json: bool) -> None:
    """Tell the life of request RID: what was found where, what was promised, what landed when, why
    it waited, why it shrank, how it ended.

    "On this rank" is the rank that wrote the journal; everything else is agreed by all ranks.

    \b
    Example: kvlift explain run.ndjson request-17
    """
    with journal_lines(journal) as lines:
        told = explained(lines, rid)
    if not told:
        fail(f"{journal} does not name a request {plain(rid)!r}: look at its Submit calls")
    if as_json:
        print_json({"events": [attrs.asdict(one) for one in told]})
        return
    for one in told:
        click.echo(f"tick {one.tick:>6}  {one.ms:>10.3f} ms  attempt {one.attempt}: {one.text}")
