"""More pages for a running request: answered in the same call, from the agreed ledger.

Free pages, clean cached ones and the reserve give at once. Dirty pages and those of a retracted
request give only when they are safe below, those that a rank set aside when it has them back: then
the growth waits, for at most `N_TICKS_MAX` ticks.
"""

from typing import Final

from kvlift.core.agreed import Growth, Request
from kvlift.core.apply import happen
from kvlift.core.dirty import n_device_dirty, start_down
from kvlift.core.draft import Draft
from kvlift.core.event import Grown
from kvlift.core.ids import DeviceHandle
from kvlift.core.notice import HasGrown
from kvlift.core.phase import Running

N_TICKS_MAX: Final = 3


def grow(draft: Draft, request: Request, n_pages: int) -> tuple[DeviceHandle, ...] | None:
    """The new pages, or None where they are refused or must wait (then a growth is pending)."""
    pages = _take(draft, request, n_pages)
    if pages is None and _may_help_to_wait(draft, n_pages):
        start_down(draft, n_pages)
        deadline = draft.before.tick + N_TICKS_MAX
        draft.growths.append(Growth(attempt=request.attempt, n_pages=n_pages, deadline=deadline))
    return pages


def _take(draft: Draft, request: Request, n_pages: int) -> tuple[DeviceHandle, ...] | None:
    n_clean = draft.index.n_device_idle - n_device_dirty(draft)
    if n_pages > draft.n_device_free() + n_clean:
        return None
    pages = draft.take_device(n_pages)
    happen(draft, request.attempt, Grown(pages))
    return pages


def _may_help_to_wait(draft: Draft, n_pages: int) -> bool:
    """Pages that are on their way down, or could start, would be enough, or those that a rank had
    set aside when it last said so: while a growth waits, ranks say what room they have now."""
    n_moving = sum(
        segment.n_pages
        for segment in draft.index.segments.values()
        if segment.device is not None and segment.mirroring and segment.device_pins == 1
    )
    n_aside = draft.policy.n_device_pages - draft.ledger.device_room
    return n_pages <= draft.n_device_free() + draft.index.n_device_idle + n_moving + n_aside


def settle_growths(draft: Draft) -> None:
    """Try those that wait again; refuse those that have waited long enough."""
    waiting = draft.growths
    draft.growths = []
    for growth in waiting:
        request = draft.requests.get(growth.attempt)
        if request is None or not isinstance(request.phase, Running):
            continue
        pages = _take(draft, request, growth.n_pages)
        if pages is None and draft.before.tick + 1 < growth.deadline:
            draft.growths.append(growth)
            continue
        draft.notices.append(HasGrown(rid=request.rid, attempt=request.attempt, pages=pages or ()))
