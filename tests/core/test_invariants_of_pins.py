"""What each invariant about pins, marks and the tree says of a spoilt state."""

from collections.abc import Callable

import pytest
from attrs import evolve

from kvlift.core.agreed import Agreed
from kvlift.core.draft import Draft
from kvlift.core.index import Segment
from kvlift.core.invariants_of_pages import (
    idle_pages_are_nobodys,
    marks_have_descents,
    pins_are_needed,
    the_tree_is_whole,
)
from kvlift.core.phase import Ready, Resuming, Retracted, Running
from kvlift.core.plan import Lease
from kvlift.core.policy import Switch
from kvlift.core.tier import Tier
from tests.core.test_admission import put
from tests.core.test_invariants_of_pages import (
    D0,
    H0,
    H9,
    PATH,
    PLAN,
    agreed_of,
    cached,
    changed,
    drained,
    filling,
    going_down,
    mirroring,
    part,
    persisting,
    with_phase,
)

# Pins.


def pinned(draft: Draft, tier: Tier, start: int, stop: int) -> Agreed:
    draft.index.pin(tier, PATH, start, stop)
    return agreed_of(draft)


DEVICE_PINS: dict[str, tuple[Callable[[], Draft], int, int]] = {
    "filling": (lambda: with_phase(cached(), filling(Lease(n_shared=2, own=()))), 0, 2),
    "ready": (
        lambda: with_phase(cached(), Ready(plan=PLAN, lease=Lease(n_shared=3, own=()))),
        0,
        3,
    ),
    "running": (
        lambda: with_phase(cached(), Running(plan=PLAN, lease=Lease(n_shared=4, own=()))),
        0,
        4,
    ),
    "mirroring": (lambda: going_down(cached(), mirroring(1, 2)), 1, 3),
    "persisting": (lambda: going_down(cached(), persisting(2, 3, from_host=False)), 2, 4),
}
HOST_PINS: dict[str, tuple[Callable[[], Draft], int, int]] = {
    "filling": (
        lambda: with_phase(cached(0, 4), filling(Lease(n_shared=0, own=()), part(1, 3, 6))),
        1,
        3,
    ),
    "retracted": (
        lambda: with_phase(
            cached(0, 4),
            Retracted(
                plan=PLAN, n_pages_pinned=3, tail_device=None, tail_host=None, tail_copy=None
            ),
        ),
        0,
        3,
    ),
    "resuming": (
        lambda: with_phase(
            cached(0, 4),
            Resuming(plan=PLAN, n_pages_pinned=2, tail_device=None, tail_host=None, tail_copy=None),
        ),
        0,
        2,
    ),
    "persisting": (lambda: going_down(cached(0, 4), persisting(0, 1, from_host=True)), 0, 2),
    "draining": (lambda: drained(cached(0, 4), pins=(2, 4)), 2, 4),
}


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("who", [*DEVICE_PINS, "retracted", "resuming", "draining"])
def test_each_that_needs_pages_pins_exactly_those(tier: Tier, who: str) -> None:
    pins = DEVICE_PINS if tier is Tier.DEVICE else HOST_PINS
    if who not in pins:
        return
    made, start, stop = pins[who]
    agreed = pinned(made(), tier, start, stop)
    assert pins_are_needed(agreed) is None
    assert idle_pages_are_nobodys(agreed) is None
    draft = made()
    list(draft.index.cover(PATH, start, stop))
    unpinned = agreed_of(draft)
    said = pins_are_needed(unpinned)
    assert said is not None
    needed = (1, 0) if tier is Tier.DEVICE else (0, 1)
    assert said.endswith(f"has (device, host) pins (0, 0), needed are {needed}")
    said = idle_pages_are_nobodys(unpinned)
    assert said is not None
    assert said.startswith(f"{tier.value} pages (")
    assert said.endswith(") may be evicted and are in use")
    twice = made()
    twice.index.pin(tier, PATH, start, stop)
    assert pins_are_needed(pinned(twice, tier, start, stop)) is not None


def test_a_copy_that_is_over_or_has_pages_of_its_own_pins_nothing() -> None:
    for one in (part(1, 3, None), part(1, 2, 6, H9)):
        draft = with_phase(cached(0, 4), filling(Lease(n_shared=0, own=()), one))
        assert pins_are_needed(agreed_of(draft)) is None


def test_pins_end_where_segments_end() -> None:
    draft = with_phase(cached(), filling(Lease(n_shared=2, own=())))
    assert pins_are_needed(agreed_of(draft)) == ("device: 2 pages of a segment of 4 are pinned")
    draft = going_down(cached(), mirroring(2, 3))
    assert pins_are_needed(agreed_of(draft)) == ("device: 2 pages of a segment of 4 are pinned")
    draft = drained(cached(0, 4), pins=(1, 4))
    assert pins_are_needed(agreed_of(draft)) == "host: 3 pages of a segment of 4 are pinned"


def test_pinned_pages_are_in_the_index() -> None:
    draft = with_phase(cached(2), filling(Lease(n_shared=3, own=())))
    assert pins_are_needed(agreed_of(draft)) == (
        "device: the pages [0, 3) are pinned, 2 are in the index"
    )
    draft = drained(cached(0, 2), pins=(0, 4))
    assert pins_are_needed(agreed_of(draft)) == (
        "host: the pages [0, 4) are pinned, 2 are in the index"
    )
    draft = drained(cached(0, 2), pins=(2, 3))
    assert pins_are_needed(agreed_of(draft)) == (
        "host: the pages [2, 3) are pinned, 0 are in the index"
    )


def test_a_copy_in_several_runs_pins_each_run_once() -> None:
    draft = going_down(cached(), mirroring(0, 2, 3))
    draft.index.pin(Tier.DEVICE, PATH, 0, 1)
    draft.index.pin(Tier.DEVICE, PATH, 2, 4)
    assert pins_are_needed(agreed_of(draft)) is None
    draft.index.pin(Tier.DEVICE, PATH, 1, 2)
    assert pins_are_needed(agreed_of(draft)) is not None


# Marks.


def test_marks_and_copies_down_belong_together() -> None:
    draft = going_down(cached(), mirroring(1, 2))
    for segment in list(draft.index.cover(PATH, 1, 3)):
        draft.index.mark_mirroring(segment, Switch.ON)
    assert marks_have_descents(agreed_of(draft)) is None
    (marked,) = (s for s in draft.index.segments.values() if s.mirroring)
    draft.descents.clear()
    assert marks_have_descents(agreed_of(draft)) == (
        f"segment {marked.id}: mirroring is True, by 0"
    )
    draft = going_down(cached(2), mirroring(0, 1))
    assert marks_have_descents(agreed_of(draft)) == "segment 1: mirroring is False, by 1"


@pytest.mark.parametrize("from_host", [False, True])
def test_marks_and_writes_belong_together(*, from_host: bool) -> None:
    draft = going_down(cached(), persisting(1, 2, from_host=from_host))
    for segment in list(draft.index.cover(PATH, 1, 3)):
        draft.index.mark_persisting(segment, Switch.ON)
    assert marks_have_descents(agreed_of(draft)) is None
    (marked,) = (s for s in draft.index.segments.values() if s.persisting)
    draft.descents.clear()
    assert marks_have_descents(agreed_of(draft)) == f"segment {marked.id}: persisting is True"
    draft = going_down(cached(2), persisting(0, 1, from_host=from_host))
    assert marks_have_descents(agreed_of(draft)) == "segment 1: persisting is False"


# The tree.


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: evolve(s, id=7), "it calls itself 7"),
        (lambda s: evolve(s, n_pages=0), "0 pages do not fit its tokens"),
        (lambda s: evolve(s, n_pages=3), "3 pages do not fit its tokens"),
        (lambda s: evolve(s, n_children=1), "it counts 1 children and has 0"),
        (lambda s: evolve(s, device=None), "nothing is left of it"),
        (lambda s: evolve(s, device=(D0,)), "it has 1 device pages for 4"),
        (lambda s: evolve(s, host=(H0,)), "it has 1 host pages for 4"),
        (lambda s: evolve(s, parent=8), "its parent is gone"),
        (lambda s: evolve(s, namespace=b"other"), "its parent does not find it"),
        (lambda s: evolve(s, tokens=bytes(len(s.tokens))), "its parent does not find it"),
    ],
)
def test_a_segment_out_of_place_is_found(change: Callable[[Segment], Segment], said: str) -> None:
    draft = cached()
    assert the_tree_is_whole(agreed_of(draft)) is None
    assert the_tree_is_whole(changed(draft, change)) == f"segment 1: {said}"


def test_a_parent_that_is_gone_or_counts_wrong_is_found() -> None:
    draft = cached(2)
    put(draft, Tier.DEVICE, PATH, 2, 4)
    assert the_tree_is_whole(agreed_of(draft)) is None
    assert the_tree_is_whole(changed(draft, lambda s: evolve(s, n_children=0))) == (
        "segment 1: it counts 0 children and has 1"
    )
    agreed = agreed_of(draft)
    orphans = {key: s for key, s in agreed.index.segments.items() if key != 1}
    assert the_tree_is_whole(evolve(agreed, index=evolve(agreed.index, segments=orphans))) == (
        "segment 2: its parent is gone"
    )


def test_a_key_that_leads_nowhere_is_found() -> None:
    agreed = agreed_of(cached())
    keys = {**agreed.index.child_by_key, (1, b"no such page"): 9}
    assert the_tree_is_whole(evolve(agreed, index=evolve(agreed.index, child_by_key=keys))) == (
        "the index finds a segment that is gone"
    )
