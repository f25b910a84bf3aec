"""Landed pages join the index, so that others can share them; each page once in the end.

A page that the index already has on the device is exchanged for the index's: the bytes are equal,
and nothing reads the request's own copy yet (before it runs) or any more (after it has ended).
"""

from kvlift.core.agreed import Request
from kvlift.core.draft import Draft
from kvlift.core.ids import DeviceHandle
from kvlift.core.index import walk
from kvlift.core.plan import Lease
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier


def published(draft: Draft, request: Request, lease: Lease, stop: int) -> Lease:
    """The lease after its own pages [n_shared, stop) have joined the index, pinned."""
    start = lease.n_shared
    stop = min(stop, _n_pages_free_to_join(draft, request.prompt, start, stop))
    if stop <= start:
        return lease
    now = draft.moment()
    index, prompt = draft.index, request.prompt
    index.extend(prompt, stop, now=now, priority=request.priority)
    twice: list[DeviceHandle] = []
    page = start
    for segment in list(index.cover(prompt, start, stop)):
        handles = lease.pages(page, page + segment.n_pages)
        if segment.device is None:
            index.set_device(index.segments[segment.id], handles)
        else:
            twice.extend(handles)
        page += segment.n_pages
    index.pin(Tier.DEVICE, prompt, start, stop)
    index.touch(prompt, stop, now=now, priority=request.priority)
    draft.free_device(tuple(twice))
    return Lease(n_shared=stop, own=lease.own[stop - start :])


def _n_pages_free_to_join(draft: Draft, prompt: Prompt, start: int, stop: int) -> int:
    """Up to the first page whose flushed copy is still pinned: nothing may join behind it."""
    for segment, first, n_common in walk(draft.index.view(), prompt):
        if segment.device_stale and first + n_common > start:
            return max(first, start)
    return stop
