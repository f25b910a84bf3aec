"""The store's files: page files, the byte counter, the marker, names in the folder.

An input: a byte for what is harmed, a byte for what is sealed again afterwards, and edits. An edit
is its kind, a place (two bytes), a length, and the bytes.
"""

import logging
import os
import shutil
import struct
import tempfile
import zlib
from pathlib import Path
from random import Random
from typing import Final

from kvlift.core.policy import Switch
from kvlift.effects.stores.care import Depth, survey
from kvlift.effects.stores.file_medium import FileMedium, Fsync
from kvlift.effects.stores.folder import MARKER, Folder, StoreRefusedError, is_orphan, now_ns
from kvlift.effects.stores.page_file import (
    HEADER_BYTES,
    Caching,
    DamagedPageError,
    inspect_page,
    verify_page,
)
from kvlift.effects.stores.room import Room
from kvlift.effects.stores.usage import Usage
from tests.fuzz.mutations import CLAIMS, ODD_INTS

PAGE_BYTES: Final = 64
KEY: Final = bytes(range(32))
NAMESPACE: Final = bytes(range(32, 64))
PAGE: Final = bytes(range(100, 164))
FIELDS_BYTES: Final = struct.calcsize("<8sIQ32s32sI")
FILE_BYTES_MAX: Final = 1 << 16
KINDS: Final = ("page", "page", "page", "usage", "marker", "name")


def edited(data: bytes, edits: bytes) -> bytes:
    """`data` after the edits; any bytes are edits."""
    changed, at = bytearray(data), 0
    while at + 4 <= len(edits) and len(changed) < FILE_BYTES_MAX:
        kind, place, size = edits[at] % 7, int.from_bytes(edits[at + 1 : at + 3]), edits[at + 3]
        piece = edits[at + 4 : at + 4 + size]
        at += 4 + size
        place %= len(changed) + 1
        match kind:
            case 0:
                changed[place : place + len(piece)] = piece
            case 1:
                changed[place:place] = piece
            case 2:
                del changed[place : place + size]
            case 3:
                del changed[place:]
            case 4:
                changed += piece
            case 5:
                changed[place:place] = piece * 64
            case _:
                changed[:] = piece
    return bytes(changed)


def sealed(data: bytes, which: int) -> bytes:
    """A liar's file: the checksums of page (1) and header (2) made right again."""
    changed = bytearray(data)
    if which & 1 and len(changed) >= HEADER_BYTES:
        struct.pack_into("<I", changed, FIELDS_BYTES - 4, zlib.crc32(changed[HEADER_BYTES:]))
    if which & 2 and len(changed) >= FIELDS_BYTES + 4:
        struct.pack_into("<I", changed, FIELDS_BYTES, zlib.crc32(changed[:FIELDS_BYTES]))
    return bytes(changed)


class PagesSurface:
    name = "pages"

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        self._home = Path(
            tempfile.mkdtemp(prefix="kvlift-fuzz-", dir=memory if memory.is_dir() else None)
        )
        self._folder = Folder(self._home / "kv")
        self._folder.create(Switch.OFF)
        room = Room(self._folder, None)
        self._medium = FileMedium(self._folder, room, PAGE_BYTES, Fsync.OFF, Caching.BUFFERED)
        logging.getLogger("kvlift.storage").setLevel(logging.CRITICAL)
        draft = self._medium.draft(KEY, NAMESPACE, 1)
        assert draft is not None
        assert draft.fill(lambda: memoryview(PAGE))
        assert draft.publish()
        self._path = self._folder.page_path(KEY)
        self._valid = Path(self._path).read_bytes()
        self._marker = (self._folder.root / MARKER).read_bytes()
        self._usage = Path(self._folder.usage).read_bytes()
        self._into = bytearray(PAGE_BYTES)

    def close(self) -> None:
        shutil.rmtree(self._home)

    def made(self, draw: Random) -> bytes:
        parts = [bytes([draw.randrange(256), draw.choice((0, 0, 1, 2, 3))])]
        for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
            # Where the fields are, at the edge of the header, in the page.
            place = draw.choice(
                (
                    draw.randrange(FIELDS_BYTES + 4),
                    HEADER_BYTES + draw.randint(-2, PAGE_BYTES + 2),
                    draw.randrange(1 << 16),
                )
            )
            piece = draw.choice(
                (
                    draw.randbytes(draw.randint(0, 12)),
                    draw.choice(ODD_INTS).to_bytes(9, "little", signed=True)[:8],
                    draw.choice(CLAIMS)[:255],
                )
            )
            parts.append(
                bytes([draw.choice((0, 0, 0, 1, 2, 3, 4, 5, 6))]) + place.to_bytes(2, "big")
            )
            parts.append(bytes([len(piece)]) + piece)
        return b"".join(parts)

    def fed(self, data: bytes) -> str:
        kind = KINDS[(data[0] if data else 0) % len(KINDS)]
        seals, edits = (data[1] if len(data) > 1 else 0), data[2:]
        match kind:
            case "usage":
                return self._read_usage(edited(self._usage, edits))
            case "marker":
                return self._read_marker(edited(self._marker, edits))
            case "name":
                return self._look_at_name(edited(KEY.hex().encode() + b".page", edits))
            case _:
                return self._read_page(sealed(edited(self._valid, edits), seals), seals)

    def _read_page(self, content: bytes, seals: int) -> str:
        _write(self._path, content)
        words = []
        for look in (inspect_page, verify_page):
            try:
                look(self._path, KEY, len(content))
                words.append("good")
            except DamagedPageError:
                words.append("damaged")
        self._medium.forget_known()
        was_hit = self._medium.has(KEY)
        is_good = self._medium.read(KEY, NAMESPACE, memoryview(self._into), 2)
        if is_good:
            assert was_hit
            assert words == ["good", "good"]
            assert self._into == PAGE or seals & 1, "a wrong byte was believed"
            return "page read"
        assert not self._medium.has(KEY), "a damaged page is a hit again"
        return "page damaged"

    def _read_usage(self, content: bytes) -> str:
        _write(self._folder.usage, content)
        with Usage(self._folder.usage).locked(5.0) as counter:
            used_bytes = counter.used_bytes
            assert used_bytes is None or 0 <= used_bytes < 1 << 64
            counter.add(-1)
        return "counter unknown" if used_bytes is None else "counter read"

    def _read_marker(self, content: bytes) -> str:
        _write(str(self._folder.root / MARKER), content)
        is_store = self._folder.is_store()
        try:
            self._folder.create(Switch.OFF)
        except StoreRefusedError:
            return "marker refused"
        assert self._folder.is_store(), "a marker that is none was not made anew"
        return "marker read" if is_store else "marker made anew"

    def _look_at_name(self, name: bytes) -> str:
        """A file with any name, in the folder of pages and in that of unfinished ones."""
        name = name.replace(b"/", b"_").replace(b"\0", b"_")[:255]
        if name in (b"", b".", b".."):
            return "no name"
        places = [
            os.fsencode(os.path.dirname(self._path)),
            os.fsencode(self._folder.temporary),
            os.fsencode(self._folder.pages),
        ]
        mine = os.fsencode(self._path)
        made = [path for place in places if (path := place + b"/" + name) != mine]
        made = [path for path in made if not os.path.exists(path)]
        for path in made:
            _write(path, b"x" * 10)
        tally = survey(self._folder, Depth.CONTENTS, None)
        for file in self._folder.temporary_files():
            is_orphan(file, now_ns())
        self._medium.collect_orphans()
        for path in made:
            if os.path.exists(path):
                os.unlink(path)
        return "name of a page" if tally.n_damaged else "name of nothing"


def _write(path: str | bytes, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)
