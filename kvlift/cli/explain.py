"""`kvlift explain`: one request's life in plain words."""

import shlex
from pathlib import Path
from typing import Final

import attrs
import click

from kvlift.cli.output import fail, json_option, print_json
from kvlift.cli.replay import journal_lines
from kvlift.core.submission import Submit
from kvlift.runtime.explain import explain as explained
from kvlift.runtime.journal_lines import TickLine
from kvlift.runtime.journal_read import JournalReader
from kvlift.runtime.log import plain

RIDS_SHOWN_MAX: Final = 10


def _why_nothing(journal: Path, rid: str) -> str:
    """Which requests the journal does name, as far as they fit on a line."""
    rids: dict[str, None] = {}
    n_more = 0
    with journal_lines(journal) as lines:
        reader = JournalReader.of(lines)
        for line in reader:
            for value in line.calls if isinstance(line, TickLine) else ():
                call = reader.call(value)
                if not isinstance(call, Submit) or call.rid in rids:
                    continue
                if call.rid == rid:
                    return (
                        f"{journal} names {plain(rid)!r}, and can't be followed so far: "
                        f"`kvlift replay {shlex.quote(str(journal))}` says why"
                    )
                if len(rids) < RIDS_SHOWN_MAX:
                    rids[call.rid] = None
                else:
                    n_more += 1
    more = f" and {n_more} more" if n_more else ""
    named = f"{', '.join(plain(each) for each in rids)}{more}" if rids else "none"
    return f"{journal} does not name a request {plain(rid)!r}; it names {named}"


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
        fail(_why_nothing(journal, rid))
    if as_json:
        print_json({"events": [attrs.asdict(one) for one in told]})
        return
    for one in told:
        click.echo(f"tick {one.tick:>6}  {one.ms:>10.3f} ms  attempt {one.attempt}: {one.text}")
