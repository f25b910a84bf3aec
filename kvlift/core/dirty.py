"""Write-back: device pages that nothing below has yet. They are no room until they are safe.

A dirty page that can't go down (no host room) counts as clean: a cache may forget, it may not stop.
"""

from kvlift.core.descent import Due, Mirroring, Reach
from kvlift.core.draft import Draft
from kvlift.core.eviction import is_idle, order_of
from kvlift.core.index import ROOT, Segment
from kvlift.core.keys import TOKEN_BYTES
from kvlift.core.policy import WritePolicy
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier
from kvlift.core.way_down import begin_descent


def n_device_dirty(draft: Draft) -> int:
    """Idle device pages that must not be taken yet; 0 unless pages are written back."""
    if draft.policy.write is not WritePolicy.BACK:
        return 0
    dirty = [s for s in draft.index.segments.values() if is_idle(s, Tier.DEVICE) and s.is_dirty()]
    n_dirty = sum(s.n_pages for s in dirty)
    if n_dirty <= draft.n_host_free():
        return n_dirty
    n_room = draft.n_host_room_below()
    return min(n_room, sum(_n_can_go_down(draft, s, n_room) for s in dirty))


def _n_can_go_down(draft: Draft, segment: Segment, n_room: int) -> int:
    """Pages of a segment for which there is room. Its own path's host copies are none: a copy down
    never costs the pages in front of it (`way_down`)."""
    at = segment
    while at.parent != ROOT and n_room > 0:
        at = draft.index.segments[at.parent]
        if at.host is not None and at.host_pins == 0 and at.device is None:
            n_room -= at.n_pages
    return max(0, min(segment.n_pages, n_room))


def start_down(draft: Draft, n_pages: int) -> None:
    """Send the dirty pages that eviction would take first to the host.

    One that has no room there is passed over: it would be tried again and again before others."""
    if draft.policy.write is not WritePolicy.BACK:
        return
    n_room = draft.n_host_room_below()
    key = order_of(draft.policy.eviction)
    dirty = [
        s
        for s in draft.index.segments.values()
        if is_idle(s, Tier.DEVICE) and s.is_dirty() and not s.mirroring
    ]
    for segment in sorted(dirty, key=key):
        if n_pages <= 0:
            return
        n_going = _n_can_go_down(draft, segment, n_room)
        if n_going > 0:
            path = path_of(draft, segment)
            begin_descent(draft, path, path.n_pages_full, Reach.HOST)
            n_pages -= n_going


def is_going_down(draft: Draft) -> bool:
    """Copies to the host are due or run. Writes don't count: a store may be silent for ever."""
    return any(isinstance(descent.phase, Due | Mirroring) for descent in draft.descents)


def keep_low_water(draft: Draft) -> None:
    """Below the low-water mark of free pages, dirty pages start down before anybody needs them."""
    short = draft.policy.write_back_low_water_pages - draft.n_device_free()
    if short > 0 and not is_going_down(draft):
        start_down(draft, short)


def path_of(draft: Draft, segment: Segment) -> Prompt:
    """The tokens from the root to the end of a segment."""
    pieces = [segment.tokens]
    at = segment
    while at.parent != ROOT:
        at = draft.index.segments[at.parent]
        pieces.append(at.tokens)
    page_tokens = len(segment.tokens) // segment.n_pages // TOKEN_BYTES
    return Prompt(segment.namespace, b"".join(reversed(pieces)), page_tokens)
