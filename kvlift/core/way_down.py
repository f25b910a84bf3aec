"""Moving descents on: which pages of a path the host or storage lacks, and room for them.

Host pages are made free by eviction, but never at the cost of the path itself: its own host copies
are pinned while room is sought, or a path longer than the host would chase its own tail.
"""

from typing import assert_never

from attrs import evolve

from kvlift.core.agreed import Kind
from kvlift.core.descent import (
    Descent,
    DescentDeed,
    DescentEvent,
    Due,
    Mirrored,
    Mirroring,
    MirrorSkipped,
    MirrorStarted,
    NothingLeft,
    Persisted,
    Persisting,
    PersistStarted,
    Reach,
    Settled,
    Stowing,
    descend,
)
from kvlift.core.draft import Draft
from kvlift.core.effect import StartMirror, StartPersist
from kvlift.core.eviction import is_idle
from kvlift.core.ids import DeviceHandle, HostHandle
from kvlift.core.index import Segment, walk
from kvlift.core.notice import PageLost
from kvlift.core.policy import Switch, WritePolicy
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier


def begin_descent(draft: Draft, prompt: Prompt, n_pages: int, reach: Reach) -> None:
    """A path whose first `n_pages` pages shall go down; `settle_descents` takes it from there."""
    if n_pages > 0:
        descent = Descent(
            id=draft.moment(), prompt=prompt, n_pages=n_pages, reach=reach, phase=Due()
        )
        draft.descents.append(descent)


def settle_descents(draft: Draft) -> None:
    """Start what can start. A descent whose parents another one is writing waits for it."""
    for at in range(len(draft.descents)):
        while True:
            before = draft.descents[at]
            event = _next_event(draft, before)
            if event is None:
                break
            draft.descents[at] = _descend(draft, before, event)[0]
    draft.descents = [d for d in draft.descents if not isinstance(d.phase, Settled)]


def descent_event(draft: Draft, descent_id: int, event: DescentEvent) -> None:
    """A verdict's news for one descent, with its deeds."""
    at = [descent.id for descent in draft.descents].index(descent_id)
    before = draft.descents[at]
    draft.descents[at], deeds = _descend(draft, before, event)
    for deed in deeds:
        match deed:
            case Mirrored(mirroring=mirroring, n_good=n_good):
                _mirrored(draft, before.prompt, mirroring, n_good)
            case Persisted(persisting=persisting, n_good=n_good):
                _persisted(draft, before.prompt, persisting, n_good)
            case _:
                assert_never(deed)
    draft.collect_evicted()


def _descend(
    draft: Draft, before: Descent, event: DescentEvent
) -> tuple[Descent, tuple[DescentDeed, ...]]:
    after, deeds = descend(before, event)
    draft.arrows.append((type(before.phase), type(event), type(after.phase)))
    draft.movers.append(before.id)
    return after, deeds


def _next_event(draft: Draft, descent: Descent) -> DescentEvent | None:
    match descent.phase:
        case Due():
            return MirrorSkipped() if descent.reach is Reach.STORAGE else _mirror(draft, descent)
        case Stowing():
            return _persist(draft, descent)
        case Mirroring() | Persisting() | Settled():
            return None
        case _:
            assert_never(descent.phase)


def _pages(draft: Draft, descent: Descent) -> list[tuple[Segment, int, int]]:
    """The path's segments that are in the index: (segment, first page, last page + 1)."""
    found = []
    for segment, start, n_common in walk(draft.index.view(), descent.prompt):
        stop = min(start + n_common, descent.n_pages)
        if start >= stop:
            break
        found.append((segment, start, stop))
    return found


# Device to host.


def _mirror(draft: Draft, descent: Descent) -> DescentEvent:
    lacking = [
        page
        for segment, start, stop in _pages(draft, descent)
        if segment.host is None
        and not segment.mirroring
        and segment.device is not None
        and not segment.device_stale
        for page in range(start, stop)
    ]
    n_placed = _n_placed(draft, descent)
    draft.index.pin(Tier.HOST, descent.prompt, 0, n_placed)
    n_room = draft.n_host_room_below()
    positions = tuple(lacking[:n_room])
    host = draft.take_host(len(positions))
    draft.index.unpin(Tier.HOST, descent.prompt, 0, n_placed)
    draft.collect_evicted()
    if len(positions) < len(lacking):
        draft.notices.append(PageLost(tier="host", n_pages=len(lacking) - len(positions)))
    if not positions:
        return MirrorSkipped()
    ticket = draft.open_ticket(Kind.MIRROR, descent.id, len(positions))
    device = _hold_device(draft, descent.prompt, positions)
    draft.effects.append(StartMirror(ticket=ticket, device=device, host=host))
    return MirrorStarted(
        Mirroring(ticket=ticket, positions=positions, host=host, host_epoch=draft.host_epoch)
    )


def _n_placed(draft: Draft, descent: Descent) -> int:
    pages = _pages(draft, descent)
    return pages[-1][2] if pages else 0


def _hold_device(
    draft: Draft, prompt: Prompt, positions: tuple[int, ...]
) -> tuple[DeviceHandle, ...]:
    """Pin the device copies that are about to be read, mark them, and name them."""
    index = draft.index
    device: list[DeviceHandle] = []
    for start, stop in _runs(positions):
        index.pin(Tier.DEVICE, prompt, start, stop)
        for segment in list(index.cover(prompt, start, stop)):
            index.mark_mirroring(segment, Switch.ON)
            device.extend(segment.device or ())
    return tuple(device)


def _mirrored(draft: Draft, prompt: Prompt, mirroring: Mirroring, n_good: int) -> None:
    index = draft.index
    handle_by_page = dict(zip(mirroring.positions, mirroring.host, strict=True))
    good = set(mirroring.positions[:n_good]) if mirroring.host_epoch == draft.host_epoch else ()
    useless: list[HostHandle] = []
    for start, stop in _runs(mirroring.positions):
        page = start
        for covered in list(index.cover(prompt, start, stop)):
            index.mark_mirroring(covered, Switch.OFF)
            pages = range(page, page + covered.n_pages)
            page += covered.n_pages
            n_kept = sum(1 for p in pages if p in good)
            segment = index.segments[covered.id]
            if segment.host is not None:
                n_kept = 0
            kept = tuple(handle_by_page[p] for p in pages[:n_kept])
            useless.extend(handle_by_page[p] for p in pages[n_kept:])
            if kept:
                first = next(iter(index.cover(prompt, pages[0], pages[0] + n_kept)))
                index.set_host(first, kept)
        index.unpin(Tier.DEVICE, prompt, start, stop)
    draft.free_host(tuple(useless))
    if n_good < len(mirroring.positions):
        _drop_what_cannot_go_down(draft, prompt, mirroring.positions[n_good:])
        draft.notices.append(PageLost(tier="host", n_pages=len(mirroring.positions) - n_good))


def _drop_what_cannot_go_down(draft: Draft, prompt: Prompt, positions: tuple[int, ...]) -> None:
    """With write-back, dirty pages hold up those that need their room until they are below. If the
    copy failed, they are forgotten: else a copy that fails for ever would hold them up for ever."""
    if draft.policy.write is not WritePolicy.BACK:
        return
    lost = set(positions)
    for segment, start, n_common in reversed(list(walk(draft.index.view(), prompt))):
        is_lost = n_common == segment.n_pages and lost.issuperset(range(start, start + n_common))
        if is_lost and is_idle(segment, Tier.DEVICE) and segment.is_dirty():
            draft.index.forget(Tier.DEVICE, draft.index.segments[segment.id])


# To storage.


def _persist(draft: Draft, descent: Descent) -> DescentEvent | None:
    """The next run of pages that storage lacks and that one tier above can give."""
    if draft.storage is Switch.OFF:
        return NothingLeft()
    positions: list[int] = []
    from_host = False
    for segment, start, stop in _pages(draft, descent):
        if segment.stored:
            if positions:
                break
            continue
        if segment.persisting:
            if positions:
                break
            return None
        has_host = segment.host is not None and not segment.host_stale
        has_device = segment.device is not None and not segment.device_stale
        if not has_host and not has_device:
            break
        if positions and has_host is not from_host:
            break
        from_host = has_host
        positions.extend(range(start, stop))
    if not positions:
        return NothingLeft()
    return _start_persist(draft, descent, tuple(positions), from_host=from_host)


def _start_persist(
    draft: Draft, descent: Descent, positions: tuple[int, ...], *, from_host: bool
) -> DescentEvent:
    index, prompt = draft.index, descent.prompt
    start, stop = positions[0], positions[-1] + 1
    ticket = draft.open_ticket(Kind.PERSIST, descent.id, len(positions))
    index.pin(Tier.HOST if from_host else Tier.DEVICE, prompt, start, stop)
    host: list[HostHandle] = []
    device: list[DeviceHandle] = []
    for segment in list(index.cover(prompt, start, stop)):
        index.mark_persisting(segment, Switch.ON)
        host.extend(segment.host or () if from_host else ())
        device.extend(() if from_host else segment.device or ())
    draft.effects.append(
        StartPersist(
            ticket=ticket,
            prompt=prompt,
            positions=positions,
            host=tuple(host),
            device=tuple(device),
        )
    )
    return PersistStarted(Persisting(ticket=ticket, positions=positions, from_host=from_host))


def _persisted(draft: Draft, prompt: Prompt, persisting: Persisting, n_good: int) -> None:
    index = draft.index
    start, stop = persisting.positions[0], persisting.positions[-1] + 1
    tier = Tier.HOST if persisting.from_host else Tier.DEVICE
    is_believed = persisting.counts is Switch.ON
    for segment in list(index.cover(prompt, start, stop)):
        index.mark_persisting(segment, Switch.OFF)
    if n_good > 0 and is_believed:
        for segment in list(index.cover(prompt, start, start + n_good)):
            index.mark_stored(segment, Switch.ON)
    index.unpin(tier, prompt, start, stop)
    if n_good < stop - start:
        draft.notices.append(PageLost(tier="storage", n_pages=stop - start - n_good))


def forget_stored(draft: Draft) -> None:
    """Storage has nothing any more, not even what is on its way there now."""
    draft.index.flush_stored()
    for at, descent in enumerate(draft.descents):
        if isinstance(descent.phase, Persisting):
            doubted = evolve(descent.phase, counts=Switch.OFF)
            draft.descents[at] = evolve(descent, phase=doubted)


def _runs(positions: tuple[int, ...]) -> list[tuple[int, int]]:
    """Positions as runs [start, stop), in order."""
    runs: list[tuple[int, int]] = []
    for page in positions:
        if runs and runs[-1][1] == page:
            runs[-1] = (runs[-1][0], page + 1)
        else:
            runs.append((page, page + 1))
    return runs
