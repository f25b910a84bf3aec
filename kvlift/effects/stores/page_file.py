"""One page in one file: a header block, then the page's bytes.

    0                                                4096                    4096 + page_bytes
    | magic version length namespace key crc32 crc32 |  page                         |

The header fills a block of 4096 bytes, so that header and page can both go past the page cache
(O_DIRECT) in one call, straight from and into the pinned page. Nothing that a file says is used to
size anything: a file has exactly the length that the reader expects, or it is damaged.

The checksum is zlib's CRC-32, computed by `effects.checksum`: it releases the interpreter lock and
runs at the speed of memory, where sha256 reaches 1.7 GB/s and blake2b 0.9. It guards against rot
and torn writes, not against an enemy: whoever may write in the folder is trusted (it is private).
"""

import ctypes
import mmap
import os
import stat
import struct
import threading
import time
from contextlib import suppress
from enum import Enum
from typing import Final

from attrs import frozen

from kvlift.effects.checksum import crc32

MAGIC: Final = b"KVLIFTPG"
FORMAT_VERSION: Final = 1
HEADER_BYTES: Final = 4096
CHUNK_BYTES: Final = 1 << 20
CLOCK_AHEAD_NS: Final = 60 * 10**9
"""By so much the clocks of machines that share a folder may differ."""

_FIELDS: Final = struct.Struct("<8sIQ32s32sI")
_SEAL: Final = struct.Struct("<I")

# O_NONBLOCK: a FIFO put in a page's place must not stop a worker; it changes nothing for files.
# O_NOATIME: the access time is ours (see `touch`), the kernel must not move it.
_OPEN_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_O_NOATIME: Final = getattr(os, "O_NOATIME", 0)
O_DIRECT: Final = getattr(os, "O_DIRECT", 0)


class DamagedPageError(Exception):
    """A file is not the page it should be; the message says why."""


class Caching(Enum):
    """Whether page files go through the kernel's page cache."""

    AUTO = "auto"
    """Past it where pages are large and aligned and the file system can."""

    BUFFERED = "buffered"


@frozen(kw_only=True)
class Header:
    """`length` is in bytes; `namespace` and `key` are 32 bytes; `checksum` is the page's crc32."""

    namespace: bytes
    key: bytes
    length: int
    checksum: int


@frozen
class PageFacts:
    """What a whole check of one file found."""

    header: Header
    size_bytes: int


def encode_header(header: Header, block: mmap.mmap) -> None:
    fields = _FIELDS.pack(
        MAGIC, FORMAT_VERSION, header.length, header.namespace, header.key, header.checksum
    )
    block[: len(fields)] = fields
    block[len(fields) : len(fields) + _SEAL.size] = _SEAL.pack(crc32(fields))


def decode_header(block: bytes | mmap.mmap) -> Header:
    """Raises DamagedPageError."""
    fields = block[: _FIELDS.size]
    if len(fields) < _FIELDS.size:
        raise DamagedPageError("the header is cut off")
    magic, version, length, namespace, key, checksum = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise DamagedPageError("the file is not a page of kvlift")
    if version != FORMAT_VERSION:
        raise DamagedPageError(f"the page has format version {version}, this is {FORMAT_VERSION}")
    seal = block[_FIELDS.size : _FIELDS.size + _SEAL.size]
    if seal != _SEAL.pack(crc32(fields)):
        raise DamagedPageError("the header's own checksum is wrong")
    return Header(namespace=namespace, key=key, length=length, checksum=checksum)


class _Blocks(threading.local):
    """A page-aligned header block for each thread, as O_DIRECT wants it."""

    def __init__(self) -> None:
        self.block = mmap.mmap(-1, HEADER_BYTES)


_blocks = _Blocks()


def is_aligned(view: memoryview) -> bool:
    """Whether O_DIRECT can read into and write from `view` (address and length)."""
    if view.readonly or len(view) % HEADER_BYTES or not len(view):
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % HEADER_BYTES == 0


def read_page(
    path: str, namespace: bytes, key: bytes, into: memoryview, flags: int, stamp_ns: int
) -> None:
    """Read the page `key` into `into` and verify it; then its access time is `stamp_ns`.

    `flags` are added to those of open(2): 0 or O_DIRECT. Raises DamagedPageError (the
    content of `into` is then anything) and OSError.
    """
    descriptor = _open_read(path, flags)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise DamagedPageError("it is not a regular file")
        if facts.st_size != HEADER_BYTES + len(into):
            raise DamagedPageError(f"it has {facts.st_size} bytes, not {HEADER_BYTES + len(into)}")
        block = _blocks.block
        if _read_all(descriptor, block, into) < HEADER_BYTES + len(into):
            raise DamagedPageError("it ended early")
        header = decode_header(block)
        if header.namespace != namespace or header.key != key:
            raise DamagedPageError("it belongs to another namespace or another key")
        if header.length != len(into):
            raise DamagedPageError(
                f"its header says {header.length} bytes, the page has {len(into)}"
            )
        if crc32(into) != header.checksum:
            raise DamagedPageError("the page's checksum is wrong")
        touch(descriptor, facts, stamp_ns)
    finally:
        os.close(descriptor)


def write_page(descriptor: int, namespace: bytes, key: bytes, data: memoryview) -> None:
    """Write header and page to an empty file. Raises OSError, also where the disk is full."""
    block = _blocks.block
    encode_header(
        Header(namespace=namespace, key=key, length=len(data), checksum=crc32(data)), block
    )
    total = HEADER_BYTES + len(data)
    n_written = 0
    while n_written < total:
        if n_written < HEADER_BYTES:
            buffers = [memoryview(block)[n_written:], data]
        else:
            buffers = [data[n_written - HEADER_BYTES :]]
        n_written += os.pwritev(descriptor, buffers, n_written)


def touch(target: int | str, facts: os.stat_result, stamp_ns: int) -> None:
    """Set the access time that eviction goes by. Never back, unless a clock that was set back wrote
    it, and the time of writing stays.

    Where it can't be set (a read-only disk, somebody else's file) the page is as good without."""
    if stamp_ns > facts.st_atime_ns or is_ahead(facts.st_atime_ns):
        with suppress(OSError):
            os.utime(target, ns=(stamp_ns, facts.st_mtime_ns))


def is_ahead(time_ns: int) -> bool:
    """Whether a file's time is of a clock that has been set back since."""
    return time_ns > time.time_ns() + CLOCK_AHEAD_NS


def inspect_page(path: str, key: bytes, size_bytes: int) -> PageFacts:
    """Check length and header of one file, not its page. Raises DamagedPageError and OSError."""
    descriptor = _open_read(path, 0)
    try:
        return _inspect(descriptor, key, size_bytes)
    finally:
        os.close(descriptor)


def verify_page(path: str, key: bytes, size_bytes: int) -> PageFacts:
    """The same with the page's checksum, in small pieces. Raises DamagedPageError and OSError."""
    descriptor = _open_read(path, 0)
    try:
        facts = _inspect(descriptor, key, size_bytes)
        checksum, offset = 0, HEADER_BYTES
        while piece := os.pread(descriptor, CHUNK_BYTES, offset):
            checksum = crc32(piece, checksum)
            offset += len(piece)
        if offset != facts.size_bytes or checksum != facts.header.checksum:
            raise DamagedPageError("the page's checksum is wrong")
        return facts
    finally:
        os.close(descriptor)


def _inspect(descriptor: int, key: bytes, size_bytes: int) -> PageFacts:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise DamagedPageError("it is not a regular file")
    header = decode_header(os.pread(descriptor, HEADER_BYTES, 0))
    if header.key != key:
        raise DamagedPageError("it belongs to another key")
    if HEADER_BYTES + header.length != size_bytes:
        raise DamagedPageError(
            f"it has {size_bytes} bytes, its header says {header.length} + header"
        )
    return PageFacts(header, size_bytes)


def _open_read(path: str, flags: int) -> int:
    try:
        return os.open(path, _OPEN_READ | _O_NOATIME | flags)
    except PermissionError:
        # Only the owner may ask for O_NOATIME; a trusted folder of somebody else works without.
        return os.open(path, _OPEN_READ | flags)


def _read_all(descriptor: int, block: mmap.mmap, into: memoryview) -> int:
    total = HEADER_BYTES + len(into)
    n_read = 0
    while n_read < total:
        if n_read < HEADER_BYTES:
            buffers = [memoryview(block)[n_read:], into]
        else:
            buffers = [into[n_read - HEADER_BYTES :]]
        more = os.preadv(descriptor, buffers, n_read)
        if more == 0:
            break
        n_read += more
    return n_read
