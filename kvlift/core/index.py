"""The prefix index: which pages of which prompts are in which tier, page granular.

A radix tree whose edges are *segments*: runs of consecutive pages of one prompt that share one
state (the same tiers, the same pins). A segment is split where states part, so that no field of it
needs to say "the first k of them". Tokens are compared as bytes, never by hash alone, and a child
is found by its first page. This file is the value and the questions; `index_edit` changes it.

    prompt   |page 0|page 1|page 2|page 3|page 4|page 5|
    segments |------ A -----|--- B --|------- C -------|      C may have siblings after B
    device    h7    h8     h9    h10    .      .
    host      .     .      h3    h4     h5     h6
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from attrs import frozen

from kvlift.core.ids import DeviceHandle, HostHandle
from kvlift.core.prompt import Prompt

ROOT = 0
"""The parent of every first segment. Its children's keys begin with their namespace."""

ChildKey = tuple[int, bytes]


@frozen(kw_only=True)
class Segment:
    """Consecutive pages in one state. `device` and `host` hold a handle a page, or None.

    `stored`: every rank has these pages in storage, as far as is known. `device_pins`, `host_pins`:
    how many requests and copies need the copy in that tier. `*_stale`: flushed while pinned; not
    found any more, and forgotten when the last pin goes. `mirroring`, `persisting`: a copy down is
    under way. `used`, `born` are instants of the agreed event order, not of a clock.
    """

    id: int
    parent: int
    namespace: bytes
    tokens: bytes
    n_pages: int
    device: tuple[DeviceHandle, ...] | None = None
    host: tuple[HostHandle, ...] | None = None
    stored: bool = False
    device_pins: int = 0
    host_pins: int = 0
    device_stale: bool = False
    host_stale: bool = False
    mirroring: bool = False
    persisting: bool = False
    used: int = 0
    born: int = 0
    n_uses: int = 0
    priority: int = 0
    n_children: int = 0

    def is_dirty(self) -> bool:
        """On the device and nowhere below."""
        return self.device is not None and self.host is None and not self.stored

    def is_bare(self) -> bool:
        """Nothing left that would be worth a place in the tree."""
        return (
            self.device is None
            and self.host is None
            and self.n_children == 0
            and self.device_pins == 0
            and self.host_pins == 0
        )


@frozen(kw_only=True)
class Index:
    """`n_*_idle` count resident pages without a pin: those that eviction may take."""

    segments: Mapping[int, Segment] = MappingProxyType({})
    child_by_key: Mapping[ChildKey, int] = MappingProxyType({})
    next_id: int = 1
    n_device: int = 0
    n_device_idle: int = 0
    n_host: int = 0
    n_host_idle: int = 0


@frozen
class Hit:
    """Agreed prefix, in pages: [0, device) is on the device, [device, host) on the host."""

    device: int
    host: int


def child_key(parent: int, prompt: Prompt, page: int) -> ChildKey:
    """How a child of `parent` that begins with page `page` of the prompt is found."""
    size = prompt.page_bytes()
    first = prompt.tokens[page * size : (page + 1) * size]
    return (parent, prompt.namespace + first if parent == ROOT else first)


def n_pages_common(tokens: bytes, offset: int, segment: Segment, page_bytes: int) -> int:
    """How many leading pages of the segment equal the tokens at `offset`; binary search."""
    if tokens.startswith(segment.tokens, offset):
        return segment.n_pages
    low, high = 0, min(segment.n_pages - 1, (len(tokens) - offset) // page_bytes)
    while low < high:
        middle = (low + high + 1) // 2
        if tokens.startswith(segment.tokens[: middle * page_bytes], offset):
            low = middle
        else:
            high = middle - 1
    return low


def walk(index: Index, prompt: Prompt) -> Iterator[tuple[Segment, int, int]]:
    """Segments along the prompt: (segment, page where it begins, pages of it that match)."""
    size = prompt.page_bytes()
    segments, children = index.segments, index.child_by_key
    parent, page, n_pages = ROOT, 0, prompt.n_pages_full
    while page < n_pages:
        found = children.get(child_key(parent, prompt, page))
        if found is None:
            return
        segment = segments[found]
        n_common = n_pages_common(prompt.tokens, page * size, segment, size)
        yield segment, page, n_common
        if n_common < segment.n_pages:
            return
        parent, page = segment.id, page + n_common


def match(index: Index, prompt: Prompt) -> Hit:
    """The longest prefix on the device, and on from there on the host, each to its first hole."""
    device = host = 0
    on_device = True
    for segment, start, n_common in walk(index, prompt):
        if on_device and segment.device is not None and not segment.device_stale:
            device = host = start + n_common
            continue
        on_device = False
        if segment.host is None or segment.host_stale:
            break
        host = start + n_common
    return Hit(device, host)


def host_hit(index: Index, prompt: Prompt, start: int) -> int:
    """Where the run of host copies ends that begins with page `start`."""
    stop = start
    for segment, first, n_common in walk(index, prompt):
        if first + n_common <= start:
            continue
        if segment.host is None or segment.host_stale:
            break
        stop = first + n_common
    return stop


def device_pages(index: Index, prompt: Prompt, n_pages: int) -> tuple[DeviceHandle, ...]:
    """Handles of the first `n_pages` pages of a prompt, all of which are on the device."""
    found: list[DeviceHandle] = []
    for segment, _start, n_common in walk(index, prompt):
        if len(found) >= n_pages or segment.device is None:
            break
        found.extend(segment.device[: min(n_common, n_pages - len(found))])
    assert len(found) == n_pages, f"{n_pages} device pages asked for, the index has {len(found)}"
    return tuple(found)


def host_pages(index: Index, prompt: Prompt, start: int, stop: int) -> tuple[HostHandle, ...]:
    """Handles of the pages [start, stop) of a prompt, all of which are on the host."""
    found: list[HostHandle] = []
    for segment, first, n_common in walk(index, prompt):
        if first >= stop:
            break
        if first + n_common > start and segment.host is not None:
            found.extend(segment.host[max(0, start - first) : min(n_common, stop - first)])
    n_pages = stop - start
    assert len(found) == n_pages, f"{n_pages} host pages asked for, the index has {len(found)}"
    return tuple(found)
