"""Looking after a store folder from outside: counts, damage, leftovers.

Works beside live stores.
"""

from collections.abc import Callable, Iterator
from enum import Enum

from attrs import define, frozen

from kvlift.effects.stores.folder import FileFacts, Folder, is_orphan, now_ns
from kvlift.effects.stores.page_file import DamagedPageError, PageFacts, inspect_page, verify_page
from kvlift.effects.stores.room import Room


class Depth(Enum):
    """How closely pages are looked at: length and header, or every byte."""

    HEADERS = "headers"
    CONTENTS = "contents"


@frozen(kw_only=True)
class PageReport:
    """One page file. `damage`: why it is no page, or None; `namespace` is None where unreadable."""

    key: bytes
    path: str
    size_bytes: int
    accessed_ns: int
    written_ns: int
    namespace: bytes | None
    damage: str | None


@define
class Tally:
    """Counts over a folder. `size_bytes` counts all files, those being written or left over too."""

    n_pages: int = 0
    size_bytes: int = 0
    n_damaged: int = 0
    n_orphans: int = 0
    n_being_written: int = 0


def survey(folder: Folder, depth: Depth, each: Callable[[PageReport], None] | None) -> Tally:
    """Look at every file; `each` sees every page. Raises OSError where the folder can't be read."""
    tally = Tally()
    for page in examined(folder.page_files(), depth):
        tally.n_pages += 1
        tally.size_bytes += page.size_bytes
        tally.n_damaged += page.damage is not None
        if each is not None:
            each(page)
    now = now_ns()
    for file in folder.temporary_files():
        tally.size_bytes += file.size_bytes
        if is_orphan(file, now):
            tally.n_orphans += 1
        else:
            tally.n_being_written += 1
    return tally


def examined(files: Iterator[FileFacts], depth: Depth) -> Iterator[PageReport]:
    look = inspect_page if depth is Depth.HEADERS else verify_page
    for file in files:
        key = file.key
        if key is None:
            continue
        found: PageFacts | None = None
        damage: str | None = None
        try:
            found = look(file.path, key, file.size_bytes)
        except FileNotFoundError:
            continue
        except DamagedPageError as reason:
            damage = str(reason)
        except OSError as error:
            damage = error.strerror or "it can't be read"
        yield PageReport(
            key=key,
            path=file.path,
            size_bytes=file.size_bytes,
            accessed_ns=file.accessed_ns,
            written_ns=file.written_ns,
            namespace=None if found is None else found.header.namespace,
            damage=damage,
        )


def remove_damaged(folder: Folder, depth: Depth, each: Callable[[PageReport], None] | None) -> int:
    """Remove damaged pages; how many. Raises OSError."""
    room = Room(folder, None)
    n_removed = 0
    for page in list(examined(folder.page_files(), depth)):
        if page.damage is not None:
            room.remove(page.path)
            n_removed += 1
        if each is not None:
            each(page)
    return n_removed


def remove_orphans(folder: Folder) -> int:
    """Remove what dead writers left; how many. The account is put right too. Raises OSError."""
    room = Room(folder, None)
    n_removed = room.collect_orphans()
    room.recount()
    return n_removed


def remove_pages(folder: Folder, each: Callable[[FileFacts], None] | None) -> int:
    """Remove every page and every leftover, and nothing that is not kvlift's; how many pages.

    Files that living processes are writing stay. Raises OSError."""
    room = Room(folder, None)
    n_removed = 0
    for file in list(folder.page_files()):
        room.remove(file.path)
        n_removed += 1
        if each is not None:
            each(file)
    room.collect_orphans()
    return n_removed
