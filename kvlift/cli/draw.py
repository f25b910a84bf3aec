"""`kvlift draw`: the drawings of the manual, from the code."""

import os
import shlex
import stat
from pathlib import Path

import click

from kvlift.cli.output import end, fail, json_option, only_the_answer_on_stdout, print_json, say
from kvlift.models.draw import DRAWINGS, marked, mermaid, picture, redrawn, stale


@click.command(
    epilog="Example: kvlift draw statechart --format svg --out request.svg",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("name", required=False, type=click.Choice(list(DRAWINGS)))
@click.option(
    "--format",
    "form",
    type=click.Choice(["mermaid", "svg"]),
    default="mermaid",
    show_default=True,
    help="Text for Mermaid, or a picture.",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file.")
@click.option("--check", "checks", is_flag=True, help="Exit 1 if a drawing in --readme is stale.")
@click.option("--write", "writes", is_flag=True, help="Draw those in --readme again.")
@click.option(
    "--readme",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("README.md"),
    show_default=True,
    help="A document with `<!-- draw:NAME -->` ... `<!-- /draw -->`.",
)
@json_option
def draw(
    *,
    name: str | None,
    form: str,
    out: Path | None,
    checks: bool,
    writes: bool,
    readme: Path,
    as_json: bool,
) -> None:
    """Print a drawing: the life of a request, the way down, the layers, the tick.

    With --check or --write, look after the drawings inside a document instead.
    """
    if checks and writes:
        raise click.UsageError("--check and --write exclude each other: give one of them")
    if checks or writes:
        if name is not None or out is not None:
            raise click.UsageError("--check and --write look after --readme: leave NAME and --out")
        _look_after(readme, writes=writes, as_json=as_json)
        return
    chosen = name or "statechart"
    with only_the_answer_on_stdout(as_json=as_json):
        try:
            text = mermaid(chosen) if form == "mermaid" else picture(chosen)
        except (OSError, ValueError) as error:
            fail(f"{chosen} can't be drawn: {error}")
    if out is not None:
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            fail(f"{out} can't be written ({error.strerror}): name a file in a folder of yours")
    if as_json:
        print_json({"name": chosen, "format": form, "text": text})
    elif out is None:
        click.echo(text, nl=False)


def _look_after(readme: Path, *, writes: bool, as_json: bool) -> None:
    try:
        text = readme.read_text(encoding="utf-8")
        names, old = marked(text), stale(text)
        if writes and old:
            _replace(readme, redrawn(text))
    except OSError as error:
        fail(f"{readme} can't be read or written ({error.strerror}): name another --readme")
    except UnicodeDecodeError:
        fail(f"{readme} is no text in UTF-8: name a document")
    except ValueError as error:
        fail(f"{readme}: {error}")
    if not names:
        fail(f"{readme} has no drawing: put <!-- draw:statechart --> and <!-- /draw --> into it")
    if as_json:
        print_json({"readme": str(readme), "drawings": names, "stale": old, "written": writes})
    elif old and not writes:
        command = f"kvlift draw --write --readme {shlex.quote(str(readme))}"
        say(f"{readme} is stale in {', '.join(old)}: run `{command}`")
    else:
        say(f"{readme}: {len(names)} drawings, {len(old)} {'drawn again' if writes else 'stale'}")
    end(holds=writes or not old)


def _replace(file: Path, text: str) -> None:
    """All or nothing: a document is never left half written."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(stat.S_IMODE(file.stat().st_mode))
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
