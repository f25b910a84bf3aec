"""Invariants about pages: conservation, owners, pins, and the shape of the prefix index."""

from collections import Counter
from collections.abc import Iterable, Iterator

from kvlift.core.agreed import Agreed
from kvlift.core.counts import device_counts, host_counts, is_conserved
from kvlift.core.descent import Mirroring, Persisting
from kvlift.core.eviction import is_idle
from kvlift.core.ids import DeviceHandle, HostHandle
from kvlift.core.index import ROOT, Segment, walk
from kvlift.core.phase import Filling, Ready, Resuming, Retracted, Running
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier


def device_is_conserved(agreed: Agreed) -> str | None:
    """On the device free + cached + owned + reserved + draining = room."""
    counts = device_counts(agreed)
    if not is_conserved(counts, agreed.ledger.device_room):
        return f"{counts} are not {agreed.ledger.device_room} device pages"
    return None


def host_is_conserved(agreed: Agreed) -> str | None:
    """On the host free + cached + owned + reserved + draining = room."""
    counts = host_counts(agreed)
    if not is_conserved(counts, agreed.ledger.host_room):
        return f"{counts} are not {agreed.ledger.host_room} host pages"
    return None


def counts_are_right(agreed: Agreed) -> str | None:
    """The index's running counts are what a new count of its segments gives."""
    segments = agreed.index.segments.values()
    fresh = (
        sum(s.n_pages for s in segments if s.device is not None),
        sum(s.n_pages for s in segments if is_idle(s, Tier.DEVICE)),
        sum(s.n_pages for s in segments if s.host is not None),
        sum(s.n_pages for s in segments if is_idle(s, Tier.HOST)),
    )
    index = agreed.index
    kept = (index.n_device, index.n_device_idle, index.n_host, index.n_host_idle)
    return None if fresh == kept else f"the index counts {kept}, its segments are {fresh}"


# Owners.


def _device_owners(agreed: Agreed) -> Iterator[tuple[str, Iterable[DeviceHandle]]]:
    for segment in agreed.index.segments.values():
        yield "the index", segment.device or ()
    for request in agreed.requests.values():
        phase = request.phase
        if isinstance(phase, Filling | Ready | Running):
            yield request.rid, phase.lease.own
        elif isinstance(phase, Retracted | Resuming) and phase.tail_device is not None:
            yield request.rid, (phase.tail_device,)
    for drain in agreed.drains:
        yield f"a drain of attempt {drain.attempt}", drain.device


def _host_owners(agreed: Agreed) -> Iterator[tuple[str, Iterable[HostHandle]]]:
    for segment in agreed.index.segments.values():
        yield "the index", segment.host or ()
    for request in agreed.requests.values():
        phase = request.phase
        if isinstance(phase, Filling):
            yield request.rid, (page for part in phase.parts for page in part.host)
        elif isinstance(phase, Retracted | Resuming) and phase.tail_host is not None:
            yield request.rid, (phase.tail_host,)
    for descent in agreed.descents:
        if isinstance(descent.phase, Mirroring):
            yield f"descent {descent.id}", descent.phase.host
    for drain in agreed.drains:
        yield f"a drain of attempt {drain.attempt}", drain.host


def _two_owners(owners: Iterable[tuple[str, Iterable[int]]], n_live: int) -> str | None:
    owner_by_page: dict[int, str] = {}
    for owner, pages in owners:
        for page in pages:
            if page in owner_by_page:
                return f"page {page} belongs to {owner_by_page[page]} and to {owner}"
            owner_by_page[page] = owner
    if len(owner_by_page) != n_live:
        return f"{n_live} pages are taken, {len(owner_by_page)} have an owner"
    return None


def no_device_page_has_two_owners(agreed: Agreed) -> str | None:
    """Every device page that is taken belongs to the index, to one request, or to one drain."""
    return _two_owners(_device_owners(agreed), agreed.ledger.device_live)


def no_host_page_has_two_owners(agreed: Agreed) -> str | None:
    """Every host page that is taken belongs to one of index, request, descent and drain."""
    return _two_owners(_host_owners(agreed), agreed.ledger.host_live)


# Pins.


def _device_pinned(agreed: Agreed) -> Iterator[tuple[Prompt, int, int]]:
    for request in agreed.requests.values():
        if isinstance(request.phase, Filling | Ready | Running):
            yield request.prompt, 0, request.phase.lease.n_shared
    for descent in agreed.descents:
        phase = descent.phase
        if isinstance(phase, Mirroring):
            for start, stop in _runs(phase.positions):
                yield descent.prompt, start, stop
        elif isinstance(phase, Persisting) and not phase.from_host:
            yield descent.prompt, phase.positions[0], phase.positions[-1] + 1


def _host_pinned(agreed: Agreed) -> Iterator[tuple[Prompt, int, int]]:
    for request in agreed.requests.values():
        phase = request.phase
        if isinstance(phase, Filling):
            for part in phase.parts:
                if part.copy is not None and not part.host:
                    yield request.prompt, part.start, part.stop
        elif isinstance(phase, Retracted | Resuming):
            yield request.prompt, 0, phase.n_pages_pinned
    for descent in agreed.descents:
        down = descent.phase
        if isinstance(down, Persisting) and down.from_host:
            yield descent.prompt, down.positions[0], down.positions[-1] + 1
    for drain in agreed.drains:
        yield drain.prompt, drain.pin_host_start, drain.pin_host_stop


def _runs(positions: tuple[int, ...]) -> list[tuple[int, int]]:
    """Positions as runs [start, stop): a copy pins each run once."""
    starts = [page for page in positions if page - 1 not in positions]
    return [(a, a + sum(page >= a and not any(a < s <= page for s in starts)
                        for page in positions)) for a in starts]  # fmt: skip


def _needed_pins(
    agreed: Agreed, ranges: Iterable[tuple[Prompt, int, int]]
) -> tuple[Counter[int], str | None]:
    """How often each segment is pinned by those who hold pins; and what is out of place."""
    n_pins: Counter[int] = Counter()
    for prompt, start, stop in ranges:
        n_found = 0
        for segment, first, n_common in walk(agreed.index, prompt):
            inside = min(first + n_common, stop) - max(first, start)
            if inside <= 0:
                continue
            n_found += inside
            n_pins[segment.id] += 1
            if inside < segment.n_pages:
                n_whole = segment.n_pages
                return n_pins, f"{inside} pages of a segment of {n_whole} are pinned"
        if n_found < stop - start:
            return n_pins, f"the pages [{start}, {stop}) are pinned, {n_found} are in the index"
    return n_pins, None


def pins_are_needed(agreed: Agreed) -> str | None:
    """The pins of a segment are as many as requests, copies and drains need it."""
    device, wrong = _needed_pins(agreed, _device_pinned(agreed))
    if wrong is not None:
        return f"device: {wrong}"
    host, wrong = _needed_pins(agreed, _host_pinned(agreed))
    if wrong is not None:
        return f"host: {wrong}"
    for segment in agreed.index.segments.values():
        found = (segment.device_pins, segment.host_pins)
        needed = (device[segment.id], host[segment.id])
        if found != needed:
            return f"segment {segment.id} has (device, host) pins {found}, needed are {needed}"
    return None


def idle_pages_are_nobodys(agreed: Agreed) -> str | None:
    """What eviction may take, no request, copy or drain stands on."""
    device, _ = _needed_pins(agreed, _device_pinned(agreed))
    host, _ = _needed_pins(agreed, _host_pinned(agreed))
    for segment in agreed.index.segments.values():
        if is_idle(segment, Tier.DEVICE) and device[segment.id]:
            return f"device pages {segment.device} may be evicted and are in use"
        if is_idle(segment, Tier.HOST) and host[segment.id]:
            return f"host pages {segment.host} may be evicted and are in use"
    return None


def marks_have_descents(agreed: Agreed) -> str | None:
    """A segment is marked as being mirrored or persisted while, and only while, it is."""
    mirroring: list[tuple[Prompt, int, int]] = []
    persisting: list[tuple[Prompt, int, int]] = []
    for descent in agreed.descents:
        phase = descent.phase
        if isinstance(phase, Mirroring):
            mirroring += [(descent.prompt, *run) for run in _runs(phase.positions)]
        elif isinstance(phase, Persisting):
            persisting.append((descent.prompt, phase.positions[0], phase.positions[-1] + 1))
    up, _ = _needed_pins(agreed, mirroring)
    down, _ = _needed_pins(agreed, persisting)
    for segment in agreed.index.segments.values():
        if segment.mirroring != bool(up[segment.id]):
            return f"segment {segment.id}: mirroring is {segment.mirroring}, by {up[segment.id]}"
        if segment.persisting != bool(down[segment.id]):
            return f"segment {segment.id}: persisting is {segment.persisting}"
    return None


# The tree.


def the_tree_is_whole(agreed: Agreed) -> str | None:
    """Every segment is found by its first page under its parent, and is worth its place."""
    index = agreed.index
    children = Counter(segment.parent for segment in index.segments.values())
    for key, segment in index.segments.items():
        wrong = _misplaced(key, segment, children[key])
        if wrong is None and segment.parent != ROOT and segment.parent not in index.segments:
            wrong = "its parent is gone"
        if wrong is None and index.child_by_key.get(_key(segment)) != key:
            wrong = "its parent does not find it"
        if wrong is not None:
            return f"segment {key}: {wrong}"
    if len(index.child_by_key) != len(index.segments):
        return "the index finds a segment that is gone"
    return None


def _key(segment: Segment) -> tuple[int, bytes]:
    first = segment.tokens[: len(segment.tokens) // segment.n_pages]
    return (segment.parent, segment.namespace + first if segment.parent == ROOT else first)


def _misplaced(key: int, segment: Segment, n_children: int) -> str | None:
    if segment.id != key:
        return f"it calls itself {segment.id}"
    if segment.n_pages < 1 or len(segment.tokens) % segment.n_pages:
        return f"{segment.n_pages} pages do not fit its tokens"
    if segment.n_children != n_children:
        return f"it counts {segment.n_children} children and has {n_children}"
    if segment.is_bare():
        return "nothing is left of it"
    if segment.device is not None and len(segment.device) != segment.n_pages:
        return f"it has {len(segment.device)} device pages for {segment.n_pages}"
    if segment.host is not None and len(segment.host) != segment.n_pages:
        return f"it has {len(segment.host)} host pages for {segment.n_pages}"
    return None
