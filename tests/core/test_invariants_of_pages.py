"""What each invariant about pages says of a spoilt state, word by word."""

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from kvlift.core.agreed import Agreed, Drain
from kvlift.core.descent import Descent, DescentPhase, Mirroring, Persisting, Reach
from kvlift.core.draft import Draft
from kvlift.core.ids import Attempt, DeviceHandle, HostHandle, Ticket
from kvlift.core.index import Segment
from kvlift.core.invariants_of_pages import (
    counts_are_right,
    device_is_conserved,
    host_is_conserved,
    no_device_page_has_two_owners,
    no_host_page_has_two_owners,
)
from kvlift.core.phase import Filling, Phase, Ready, Resuming, Retracted, Running
from kvlift.core.plan import Bounds, Lease, Part, Plan
from kvlift.core.tier import Source, Tier
from tests.core.scenario import prompt_of
from tests.core.test_admission import draft_of, put, wait

PATH = prompt_of(1, 2, 3, 4)
PLAN = Plan(bounds=Bounds(device=0, shared=0, host=0, storage=0), n_pages=4, promise=0)
D0, D9, H0, H9 = DeviceHandle(0), DeviceHandle(9), HostHandle(0), HostHandle(9)


def agreed_of(draft: Draft) -> Agreed:
    return evolve(
        draft.before,
        requests=draft.requests,
        attempt_by_rid=draft.attempt_by_rid,
        tickets=draft.tickets,
        drains=tuple(draft.drains),
        descents=tuple(draft.descents),
        index=draft.index.frozen(),
        ledger=draft.ledger,
        next_ticket=draft.next_ticket,
        next_attempt=draft.next_attempt,
    )


def cached(n_device: int = 4, n_host: int = 0) -> Draft:
    """The first pages of PATH on the device, the first on the host."""
    draft = draft_of()
    put(draft, Tier.DEVICE, PATH, 0, n_device)
    put(draft, Tier.HOST, PATH, 0, n_host)
    return draft


def with_phase(draft: Draft, phase: Phase) -> Draft:
    request = wait(draft, "A", PATH)
    draft.put_phase(request.attempt, phase)
    return draft


def filling(lease: Lease, *parts: Part) -> Filling:
    return Filling(plan=PLAN, lease=lease, parts=parts, wanted=(), n_arrived=0, token=None)


def part(start: int, stop: int, copy: int | None, *host: HostHandle) -> Part:
    return Part(
        source=Source.HOST,
        start=start,
        stop=stop,
        n_good=stop - start,
        copy=None if copy is None else Ticket(copy),
        host=host,
    )


def going_down(draft: Draft, phase: DescentPhase) -> Draft:
    draft.descents.append(Descent(id=5, prompt=PATH, n_pages=4, reach=Reach.BOTH, phase=phase))
    return draft


def mirroring(*positions: int, host: tuple[HostHandle, ...] = ()) -> Mirroring:
    return Mirroring(ticket=Ticket(9), positions=positions, host=host, host_epoch=0)


def persisting(*positions: int, from_host: bool) -> Persisting:
    return Persisting(ticket=Ticket(9), positions=positions, from_host=from_host)


def drained(
    draft: Draft,
    *,
    device: tuple[DeviceHandle, ...] = (),
    host: tuple[HostHandle, ...] = (),
    pins: tuple[int, int] = (0, 0),
) -> Draft:
    draft.drains.append(
        Drain(
            attempt=Attempt(3),
            prompt=PATH,
            tickets=(Ticket(4),),
            device=device,
            host=host,
            pin_host_start=pins[0],
            pin_host_stop=pins[1],
        )
    )
    return draft


def changed(draft: Draft, change: Callable[[Segment], Segment]) -> Agreed:
    """The first segment of the path is spoilt, beside the way that keeps counts."""
    agreed = agreed_of(draft)
    key = min(agreed.index.segments)
    segments = {**agreed.index.segments, key: change(agreed.index.segments[key])}
    return evolve(agreed, index=evolve(agreed.index, segments=segments))


# Conservation.


def test_pages_are_conserved_or_counted_out() -> None:
    agreed = agreed_of(cached(4, 2))
    assert device_is_conserved(agreed) is None
    assert host_is_conserved(agreed) is None
    less = evolve(agreed, ledger=evolve(agreed.ledger, device_live=3, host_live=3))
    assert device_is_conserved(less) == (
        "Counts(free=9, cached=4, owned=0, reserved=0, draining=0) are not 12 device pages"
    )
    assert host_is_conserved(less) == (
        "Counts(free=9, cached=2, owned=0, reserved=0, draining=0) are not 12 host pages"
    )


def test_the_index_counts_resident_and_idle_pages_of_each_tier() -> None:
    draft = cached(4, 3)
    draft.index.pin(Tier.DEVICE, PATH, 0, 1)
    draft.index.pin(Tier.HOST, PATH, 0, 2)
    agreed = agreed_of(draft)
    assert counts_are_right(agreed) is None
    for field in ("n_device", "n_device_idle", "n_host", "n_host_idle"):
        nine: dict[str, Any] = {field: 9}
        wrong = evolve(agreed.index, **nine)
        said = counts_are_right(evolve(agreed, index=wrong))
        assert said is not None
        assert said.endswith("its segments are (4, 3, 3, 1)")


# Owners.


@pytest.mark.parametrize(
    "phase",
    [
        filling(Lease(n_shared=0, own=(D9,))),
        Ready(plan=PLAN, lease=Lease(n_shared=0, own=(D9,))),
        Running(plan=PLAN, lease=Lease(n_shared=0, own=(D9,))),
        Retracted(plan=PLAN, n_pages_pinned=0, tail_device=D9, tail_host=None, tail_copy=None),
        Resuming(plan=PLAN, n_pages_pinned=0, tail_device=D9, tail_host=None, tail_copy=None),
    ],
    ids=lambda phase: type(phase).__name__,
)
def test_a_request_owns_its_device_pages(phase: Phase) -> None:
    draft = with_phase(cached(2), phase)
    draft.ledger = evolve(draft.ledger, device_live=3)
    assert no_device_page_has_two_owners(agreed_of(draft)) is None
    drained(draft, device=(D9,))
    assert no_device_page_has_two_owners(agreed_of(draft)) == (
        "page 9 belongs to A and to a drain of attempt 3"
    )
    draft.drains.clear()
    draft.ledger = evolve(draft.ledger, device_live=4)
    assert no_device_page_has_two_owners(agreed_of(draft)) == ("4 pages are taken, 3 have an owner")


def test_the_index_and_drains_own_device_pages() -> None:
    draft = drained(cached(2), device=(D0,))
    assert no_device_page_has_two_owners(agreed_of(draft)) == (
        "page 0 belongs to the index and to a drain of attempt 3"
    )
    draft = with_phase(
        cached(2),
        Retracted(plan=PLAN, n_pages_pinned=0, tail_device=None, tail_host=None, tail_copy=None),
    )
    assert no_device_page_has_two_owners(agreed_of(draft)) is None


@pytest.mark.parametrize(
    "phase",
    [
        filling(Lease(n_shared=0, own=()), part(0, 1, 4, H9)),
        Retracted(plan=PLAN, n_pages_pinned=0, tail_device=None, tail_host=H9, tail_copy=None),
        Resuming(plan=PLAN, n_pages_pinned=0, tail_device=None, tail_host=H9, tail_copy=None),
    ],
    ids=lambda phase: type(phase).__name__,
)
def test_a_request_owns_its_host_pages(phase: Phase) -> None:
    draft = with_phase(cached(0, 2), phase)
    draft.ledger = evolve(draft.ledger, host_live=3)
    assert no_host_page_has_two_owners(agreed_of(draft)) is None
    drained(draft, host=(H9,))
    assert no_host_page_has_two_owners(agreed_of(draft)) == (
        "page 9 belongs to A and to a drain of attempt 3"
    )


def test_the_index_and_copies_down_own_host_pages() -> None:
    draft = going_down(cached(0, 2), mirroring(0, host=(H0,)))
    assert no_host_page_has_two_owners(agreed_of(draft)) == (
        "page 0 belongs to the index and to descent 5"
    )
    draft = going_down(cached(0, 2), mirroring(0, host=(H9,)))
    draft.ledger = evolve(draft.ledger, host_live=3)
    assert no_host_page_has_two_owners(agreed_of(draft)) is None
    draft = with_phase(
        cached(0, 2),
        Resuming(plan=PLAN, n_pages_pinned=0, tail_device=None, tail_host=None, tail_copy=None),
    )
    assert no_host_page_has_two_owners(agreed_of(draft)) is None
