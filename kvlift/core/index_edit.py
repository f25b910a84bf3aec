"""Changes to the prefix index, gathered during one tick and frozen at its end.

An edit owns its copies of the index's maps; the index it began with is never touched, so that
`advance` stays a function of its arguments (decision 0004). Every change of a segment goes through
`_put`, which keeps the counts of resident and idle pages and of resident children.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TypeVar, cast

from attrs import evolve

from kvlift.core.eviction import is_idle, victims
from kvlift.core.ids import DeviceHandle, HostHandle
from kvlift.core.index import ROOT, ChildKey, Index, Segment, child_key, n_pages_common, walk
from kvlift.core.policy import EvictionPolicy, Switch
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier

Key = TypeVar("Key")
Value = TypeVar("Value")


class IndexEdit:
    """The index while a tick decides. Reads see the changes made so far."""

    def __init__(self, index: Index) -> None:
        self._before = index
        self._changed = False
        self.segments: MutableMapping[int, Segment] = _borrowed(index.segments)
        self.child_by_key: MutableMapping[ChildKey, int] = _borrowed(index.child_by_key)
        self._next_id = index.next_id
        self.n_device = index.n_device
        self.n_device_idle = index.n_device_idle
        self.n_host = index.n_host
        self.n_host_idle = index.n_host_idle
        self.freed_device: list[DeviceHandle] = []
        self.freed_host: list[HostHandle] = []

    def view(self) -> Index:
        """The index as it is now, for questions; shares the maps with this edit."""
        return Index(
            segments=self.segments,
            child_by_key=self.child_by_key,
            next_id=self._next_id,
            n_device=self.n_device,
            n_device_idle=self.n_device_idle,
            n_host=self.n_host,
            n_host_idle=self.n_host_idle,
        )

    def frozen(self) -> Index:
        return self.view() if self._changed else self._before

    def _own(self) -> None:
        """Copy the maps before the first change of this tick; most ticks change nothing."""
        if not self._changed:
            self._changed = True
            self.segments = dict(self.segments)
            self.child_by_key = dict(self.child_by_key)

    # The one place where a segment changes.

    def _count(self, segment: Segment, sign: int) -> None:
        n_pages = sign * segment.n_pages
        if segment.device is not None:
            self.n_device += n_pages
            self.n_device_idle += n_pages if segment.device_pins == 0 else 0
        if segment.host is not None:
            self.n_host += n_pages
            self.n_host_idle += n_pages if segment.host_pins == 0 else 0

    def _put(self, segment: Segment) -> None:
        """Replace a segment by its new value; forget it when nothing is left of it."""
        self._own()
        self._count(self.segments[segment.id], -1)
        self._count(segment, 1)
        self.segments[segment.id] = segment
        if segment.is_bare():
            self._remove(segment)

    def _tell_parent(self, segment: Segment, n_more: int) -> None:
        if segment.parent != ROOT:
            parent = self.segments[segment.parent]
            self._put(evolve(parent, n_children=parent.n_children + n_more))

    def _remove(self, segment: Segment) -> None:
        del self.segments[segment.id]
        size = len(segment.tokens) // segment.n_pages
        first = segment.tokens[:size]
        key = (segment.parent, segment.namespace + first if segment.parent == ROOT else first)
        del self.child_by_key[key]
        self._tell_parent(segment, -1)

    def _split(self, segment: Segment, n_pages: int) -> Segment:
        """Cut after `n_pages`. Returns the lower part, which keeps the id and so its children."""
        self._own()
        cut = len(segment.tokens) // segment.n_pages * n_pages
        upper = evolve(
            segment,
            id=self._next_id,
            tokens=segment.tokens[:cut],
            n_pages=n_pages,
            device=None if segment.device is None else segment.device[:n_pages],
            host=None if segment.host is None else segment.host[:n_pages],
            n_children=1,
        )
        lower = evolve(
            segment,
            parent=upper.id,
            tokens=segment.tokens[cut:],
            n_pages=segment.n_pages - n_pages,
            device=None if segment.device is None else segment.device[n_pages:],
            host=None if segment.host is None else segment.host[n_pages:],
        )
        size = cut // n_pages
        first = upper.tokens[:size]
        top = segment.namespace + first if segment.parent == ROOT else first
        self.child_by_key[(segment.parent, top)] = upper.id
        self.child_by_key[(upper.id, lower.tokens[:size])] = lower.id
        self.segments[upper.id] = upper
        self.segments[lower.id] = lower
        self._next_id += 1
        return lower

    # Paths.

    def cover(self, prompt: Prompt, start: int, stop: int) -> Iterator[Segment]:
        """The segments that are exactly the pages [start, stop); splits at both ends.

        The pages must be in the tree; yields each segment's current value."""
        if start >= stop:
            return
        size = prompt.page_bytes()
        parent, page = ROOT, 0
        while page < stop:
            segment = self.segments[self.child_by_key[child_key(parent, prompt, page)]]
            if page < start < page + segment.n_pages:
                self._split(segment, start - page)
                continue
            if page + segment.n_pages > stop:
                self._split(segment, stop - page)
                continue
            n_common = n_pages_common(prompt.tokens, page * size, segment, size)
            assert n_common == segment.n_pages, "the pages are not in the index"
            page += segment.n_pages
            parent = segment.id
            if page > start:
                yield segment

    def extend(self, prompt: Prompt, stop: int, *, now: int, priority: int) -> None:
        """See to it that the pages [0, stop) have a place in the tree."""
        parent, page = ROOT, 0
        for segment, start, n_common in list(walk(self.view(), prompt)):
            if start >= stop:
                return
            if n_common < segment.n_pages and start + n_common < stop:
                lower = self._split(segment, n_common)
                parent, page = lower.parent, start + n_common
                break
            parent, page = segment.id, start + n_common
        if page >= stop:
            return
        size = prompt.page_bytes()
        segment = Segment(
            id=self._next_id,
            parent=parent,
            namespace=prompt.namespace,
            tokens=prompt.tokens[page * size : stop * size],
            n_pages=stop - page,
            born=now,
            used=now,
            priority=priority,
        )
        self._next_id += 1
        self._own()
        self.child_by_key[child_key(parent, prompt, page)] = segment.id
        self.segments[segment.id] = segment
        self._tell_parent(segment, 1)

    def touch(self, prompt: Prompt, stop: int, *, now: int, priority: int) -> None:
        """Those of the pages [0, stop) that are in the tree were of use just now, no others."""
        n_placed = sum(n_common for _, _, n_common in walk(self.view(), prompt))
        for segment in list(self.cover(prompt, 0, min(stop, n_placed))):
            self._put(
                evolve(
                    segment,
                    used=now,
                    n_uses=segment.n_uses + 1,
                    priority=max(segment.priority, priority),
                )
            )

    # Pins.

    def pin(self, tier: Tier, prompt: Prompt, start: int, stop: int) -> None:
        for segment in self.cover(prompt, start, stop):
            if tier is Tier.DEVICE:
                self._put(evolve(segment, device_pins=segment.device_pins + 1))
            else:
                self._put(evolve(segment, host_pins=segment.host_pins + 1))

    def unpin(self, tier: Tier, prompt: Prompt, start: int, stop: int) -> None:
        """The reverse of `pin` with the same pages. The last pin of a stale page forgets it."""
        for covered in reversed(list(self.cover(prompt, start, stop))):
            segment = self.segments[covered.id]
            if tier is Tier.DEVICE:
                after = evolve(segment, device_pins=segment.device_pins - 1)
                is_over = after.device_pins == 0 and after.device_stale
            else:
                after = evolve(segment, host_pins=segment.host_pins - 1)
                is_over = after.host_pins == 0 and after.host_stale
            assert min(after.device_pins, after.host_pins) >= 0, "a pin that nobody held"
            self._put(after) if not is_over else self.forget(tier, after)

    # Residency.

    def set_device(self, segment: Segment, pages: tuple[DeviceHandle, ...]) -> None:
        self._put(evolve(segment, device=pages, device_stale=False))

    def set_host(self, segment: Segment, pages: tuple[HostHandle, ...]) -> None:
        self._put(evolve(segment, host=pages, host_stale=False))

    def mark_stored(self, segment: Segment, known: Switch) -> None:
        self._put(evolve(self.segments[segment.id], stored=known is Switch.ON))

    def mark_mirroring(self, segment: Segment, under_way: Switch) -> None:
        self._put(evolve(self.segments[segment.id], mirroring=under_way is Switch.ON))

    def mark_persisting(self, segment: Segment, under_way: Switch) -> None:
        self._put(evolve(self.segments[segment.id], persisting=under_way is Switch.ON))

    def forget(self, tier: Tier, segment: Segment) -> None:
        """The segment's copy in one tier is no more; its handles are in `freed_*`."""
        if tier is Tier.DEVICE:
            self.freed_device.extend(segment.device or ())
            self._put(evolve(segment, device=None, device_stale=False))
        else:
            self.freed_host.extend(segment.host or ())
            self._put(evolve(segment, host=None, host_stale=False))

    def evict(
        self,
        tier: Tier,
        n_pages: int,
        policy: EvictionPolicy,
        may_go: Callable[[Segment], bool] = lambda segment: True,
    ) -> int:
        """Forget up to `n_pages` idle pages of a tier, exactly as many as asked if there are."""
        chosen = victims(
            self.segments.values(),
            lambda segment: self.segments.get(segment.parent),
            tier=tier,
            n_pages=n_pages,
            policy=policy,
            may_go=may_go,
        )
        for segment, n_taken in chosen:
            now = self.segments[segment.id]
            if n_taken < now.n_pages:
                now = self._split(now, now.n_pages - n_taken)
            self.forget(tier, now)
        return sum(n_taken for _segment, n_taken in chosen)

    def flush(self, tier: Tier) -> None:
        """Forget what nothing uses; what is pinned is found no more and goes with its last pin."""
        for key in list(self.segments):
            segment = self.segments.get(key)
            if segment is None:
                continue
            if is_idle(segment, tier):
                self.forget(tier, segment)
            elif tier is Tier.DEVICE and segment.device is not None:
                self._put(evolve(segment, device_stale=True))
            elif tier is Tier.HOST and segment.host is not None:
                self._put(evolve(segment, host_stale=True))

    def flush_stored(self) -> None:
        for segment in list(self.segments.values()):
            if segment.stored:
                self._put(evolve(segment, stored=False))


def _borrowed(mapping: Mapping[Key, Value]) -> MutableMapping[Key, Value]:
    """The index's own map, read but not written: `_own` copies it before the first change."""
    return cast("MutableMapping[Key, Value]", mapping)
