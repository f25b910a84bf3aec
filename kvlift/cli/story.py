"""`kvlift story`: run stories and say which hold."""

from pathlib import Path

import click

from kvlift.cli.output import json_option, print_json, say
from kvlift.testing.story_run import Verdict, run_file


@click.command(
    epilog="Example: kvlift story tests/stories/*.story",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--trace", is_flag=True, help="Print every tick: events, verdict, phases, effects.")
@json_option
def story(files: tuple[Path, ...], *, trace: bool, as_json: bool) -> None:
    """Run stories: small situations of one decode worker, under a manual clock.

    Ends with 0 if all of them hold, 1 if one does not, 2 if one cannot be parsed.
    """

    def print_trace(line: str) -> None:
        say(line) if as_json else click.echo(line)

    verdicts: list[Verdict] = []
    for file in files:
        verdicts.append(run_file(file, print_trace if trace else None))
        if not as_json:
            click.echo(str(verdicts[-1]))
    if as_json:
        print_json([_as_json(verdict) for verdict in verdicts])
    elif len(verdicts) > 1:
        say(f"{len(verdicts)} stories, {sum(v.exit_code == 0 for v in verdicts)} hold")
    raise click.exceptions.Exit(max(verdict.exit_code for verdict in verdicts))


def _as_json(verdict: Verdict) -> dict[str, str | int | bool | None]:
    return {
        "file": verdict.file,
        "ok": verdict.exit_code == 0,
        "line": verdict.line,
        "message": verdict.message,
    }
