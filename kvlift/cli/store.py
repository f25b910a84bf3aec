"""`kvlift store`: looks after the folder of a file store, also while stores are using it."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path

import click
from rich.table import Table

from kvlift.cli.output import (
    FULL,
    end,
    fail,
    json_option,
    print_json,
    progress_bar,
    say,
    table_console,
)
from kvlift.core.policy import Switch
from kvlift.effects.stores.care import (
    Depth,
    PageReport,
    Tally,
    remove_damaged,
    remove_orphans,
    remove_pages,
    survey,
)
from kvlift.effects.stores.folder import Folder, StoreRefusedError


@click.group()
def store() -> None:
    """Look after the folder of a file store: sizes, damaged pages, leftovers of dead writers.

    \b
    Example:
      kvlift store stat /var/cache/kvlift
      kvlift store verify /var/cache/kvlift --json
    """


def _on_folder(command: Callable[..., bool]) -> Callable[..., None]:
    """Give a command the folder of DIR. Its answer becomes exit code 0 or 1, and what the file
    system refuses becomes 2."""

    @wraps(command)
    def run(directory: Path, **options: object) -> None:
        try:
            holds = command(_open(directory), **options)
        except BrokenPipeError:
            raise
        except OSError as error:
            if error.errno in FULL:
                raise  # Of the output: nothing is written into the folder.
            fail(f"{directory} can't be read or changed ({error.strerror}): check its owner")
        end(holds=holds)

    return run


_directory = click.argument(
    "directory", metavar="DIR", type=click.Path(path_type=Path, exists=False)
)


@store.command("ls")
@_directory
@json_option
@click.option("--limit", type=click.IntRange(min=0), default=None, help="Show at most N pages.")
@_on_folder
def list_pages(folder: Folder, *, as_json: bool, limit: int | None) -> bool:
    """List the pages, the ones used last first.

    \b
    Example:
      kvlift store ls /var/cache/kvlift --limit 20
    """
    found: list[PageReport] = []
    tally = survey(folder, Depth.HEADERS, found.append)
    found.sort(key=lambda page: (-page.accessed_ns, page.key))
    shown = found if limit is None else found[:limit]
    if as_json:
        _print_json(tally, Depth.HEADERS, files=[_page_row(page) for page in shown])
        return True
    table = Table("key", "bytes", "namespace", "last used", "damage", box=None)
    for page in shown:
        row = _page_row(page)
        namespace = "?" if page.namespace is None else page.namespace.hex()[:8]
        used = str(row["accessed"])[:19].replace("T", " ")
        table.add_row(page.key.hex()[:16], f"{page.size_bytes:,}", namespace, used, page.damage)
    table_console().print(table)
    click.echo(_summary(tally, Depth.HEADERS))
    return True


@store.command()
@_directory
@json_option
@_on_folder
def stat(folder: Folder, *, as_json: bool) -> bool:
    """Count pages, bytes and leftovers. `damaged` counts wrong lengths and headers alone: contents
    are not read (verify reads them).

    \b
    Example:
      kvlift store stat /var/cache/kvlift --json
    """
    with _progress(folder, "looking") as step:
        tally = survey(folder, Depth.HEADERS, lambda _: step())
    if as_json:
        _print_json(tally, Depth.HEADERS)
    else:
        click.echo(_summary(tally, Depth.HEADERS))
    return True


@store.command()
@_directory
@json_option
@_on_folder
def verify(folder: Folder, *, as_json: bool) -> bool:
    """Read every page and check it. Exit code 1 if one is damaged.

    Nothing is removed: `kvlift store gc DIR --contents` removes what this finds.

    \b
    Example:
      kvlift store verify /var/cache/kvlift
    """
    damaged: list[PageReport] = []
    with _progress(folder, "verifying") as step:

        def see(page: PageReport) -> None:
            step()
            if page.damage is not None:
                damaged.append(page)

        tally = survey(folder, Depth.CONTENTS, see)
    if as_json:
        _print_json(tally, Depth.CONTENTS, files=[_page_row(page) for page in damaged])
    else:
        for page in damaged:
            click.echo(f"{page.path}: {page.damage}")
        click.echo(_summary(tally, Depth.CONTENTS))
        if damaged:
            click.echo(f"`kvlift store gc {shlex.quote(str(folder.root))} --contents` removes them")
    return not damaged


@store.command()
@_directory
@json_option
@click.option("--contents", is_flag=True, help="Read every page, and remove all that verify finds.")
@_on_folder
def gc(folder: Folder, *, as_json: bool, contents: bool) -> bool:
    """Remove leftovers of dead writers, and pages with a wrong length or header.

    A page whose contents do not fit their checksum is found, and removed, with --contents only: all
    pages are read then. The counts printed are those of what was removed; pages and bytes are what
    is left.

    \b
    Example:
      kvlift store gc /var/cache/kvlift --contents
    """
    depth = Depth.CONTENTS if contents else Depth.HEADERS
    with _progress(folder, "looking") as step:
        n_damaged = remove_damaged(folder, depth, lambda _: step())
    n_orphans = remove_orphans(folder)
    left = survey(folder, Depth.HEADERS, None)
    removed = Tally(left.n_pages, left.size_bytes, n_damaged, n_orphans, left.n_being_written)
    if as_json:
        _print_json(removed, depth)
    else:
        unread = "" if contents else "; contents were not read (--contents reads them)"
        click.echo(
            f"removed {_n(n_damaged, 'damaged page')} and {_n(n_orphans, 'leftover')}; "
            f"{_n(left.n_pages, 'page')}, {left.size_bytes:,} bytes are left{unread}"
        )
    return True


@store.command()
@_directory
@json_option
@click.option("--yes", is_flag=True, help="Don't ask.")
@_on_folder
def clear(folder: Folder, *, as_json: bool, yes: bool) -> bool:
    """Remove all pages. Asks first. Files that are not kvlift's stay.

    The counts printed are those of what is left.

    \b
    Example:
      kvlift store clear /var/cache/kvlift --yes
    """
    if not yes:
        n_pages = sum(1 for _ in folder.page_files())
        if not _is_confirmed(f"Remove {_n(n_pages, 'page')} from {folder.root}?"):
            fail("nothing was removed: answer y, or call it with --yes")
    with _progress(folder, "removing") as step:
        n_removed = remove_pages(folder, lambda _: step())
    left = survey(folder, Depth.HEADERS, None)
    if as_json:
        _print_json(left, Depth.HEADERS, removed=n_removed)
    else:
        click.echo(f"removed {_n(n_removed, 'page')}; {_summary(left, Depth.HEADERS)}")
    return True


def _is_confirmed(question: str) -> bool:
    try:
        return click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise  # Ctrl-C
        return False  # Nobody is there to answer.


def _open(directory: Path) -> Folder:
    folder = Folder(directory.absolute())
    if not directory.is_dir():
        fail(f"{directory} is not a folder: name the folder of a file store")
    if not folder.is_store():
        fail(
            f"{directory} is not a file store of kvlift: name the folder that was given as storage"
        )
    try:
        # Whoever runs this may be another user than the store's; that others could write is told.
        folder.check_private(Switch.OFF)
    except StoreRefusedError as reason:
        say(f"warning: {reason}")
    return folder


@contextmanager
def _progress(folder: Folder, action: str) -> Iterator[Callable[[], None]]:
    progress = progress_bar()
    if progress.disable:
        yield lambda: None
        return
    n_pages = sum(1 for _ in folder.page_files())
    with progress:
        task = progress.add_task(action, total=n_pages)
        yield lambda: progress.advance(task)


def _page_row(page: PageReport) -> dict[str, object]:
    return {
        "key": page.key.hex(),
        "bytes": page.size_bytes,
        "namespace": None if page.namespace is None else page.namespace.hex(),
        "accessed": datetime.fromtimestamp(page.accessed_ns / 1e9, UTC).isoformat(),
        "damage": page.damage,
    }


def _print_json(tally: Tally, depth: Depth, **more: object) -> None:
    """`damaged` counts what was looked at: contents too only where `contents_read` is true."""
    fields = {
        "pages": tally.n_pages,
        "bytes": tally.size_bytes,
        "damaged": tally.n_damaged,
        "orphans": tally.n_orphans,
        "being_written": tally.n_being_written,
        "contents_read": depth is Depth.CONTENTS,
    }
    print_json(fields | more)


def _summary(tally: Tally, depth: Depth) -> str:
    found = f"{tally.n_damaged} damaged"
    if depth is Depth.HEADERS:
        found = f"{tally.n_damaged} with a wrong length or header (contents not read)"
    return (
        f"{_n(tally.n_pages, 'page')}, {tally.size_bytes:,} bytes, {found}, "
        f"{_n(tally.n_orphans, 'leftover')}, {tally.n_being_written} being written"
    )


def _n(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
