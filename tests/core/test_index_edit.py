"""Each change of the index by hand: what a segment has before and after it, field by field."""

from typing import Any

import pytest
from attrs import evolve

from kvlift.core.ids import DeviceHandle, HostHandle
from kvlift.core.index import (
    ROOT,
    Index,
    Segment,
    child_key,
    walk,
)
from kvlift.core.index_edit import IndexEdit
from kvlift.core.policy import Switch
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier
from tests.core.test_index import BLUE, RED, _prompt

PATH = _prompt(1, 2, 3, 4)
SIZE = PATH.page_bytes()


def devices(*numbers: int) -> tuple[DeviceHandle, ...]:
    return tuple(DeviceHandle(n) for n in numbers)


def hosts(*numbers: int) -> tuple[HostHandle, ...]:
    return tuple(HostHandle(n) for n in numbers)


def extended(n_pages: int = 4, prompt: Prompt = PATH) -> IndexEdit:
    edit = IndexEdit(Index())
    edit.extend(prompt, n_pages, now=5, priority=3)
    return edit


def filled() -> IndexEdit:
    """One segment of four pages, on the device (10..13) and on the host (20..23)."""
    edit = extended()
    edit.set_device(edit.segments[1], devices(10, 11, 12, 13))
    edit.set_host(edit.segments[1], hosts(20, 21, 22, 23))
    return edit


def counts(edit: IndexEdit) -> tuple[int, int, int, int]:
    return edit.n_device, edit.n_device_idle, edit.n_host, edit.n_host_idle


# Places.


def test_a_new_path_is_one_segment() -> None:
    edit = extended(3)
    assert dict(edit.segments) == {
        1: Segment(
            id=1,
            parent=ROOT,
            namespace=RED,
            tokens=PATH.tokens[: 3 * SIZE],
            n_pages=3,
            born=5,
            used=5,
            priority=3,
        )
    }
    assert dict(edit.child_by_key) == {(ROOT, RED + PATH.tokens[:SIZE]): 1}
    assert edit.frozen().next_id == 2
    assert counts(edit) == (0, 0, 0, 0)


def test_a_longer_path_hangs_below_and_a_branch_splits() -> None:
    edit = extended(2)
    edit.extend(PATH, 4, now=7, priority=1)
    assert edit.segments[1].n_children == 1
    below = edit.segments[2]
    assert (below.parent, below.n_pages, below.born, below.priority) == (1, 2, 7, 1)
    assert below.tokens == PATH.tokens[2 * SIZE :]
    assert edit.child_by_key[child_key(1, PATH, 2)] == 2
    other = _prompt(1, 2, 3, 9, 9)
    edit.extend(other, 5, now=8, priority=0)
    assert {key: (s.parent, s.n_pages, s.n_children) for key, s in edit.segments.items()} == {
        1: (0, 2, 1),
        3: (1, 1, 2),
        2: (3, 1, 0),
        4: (3, 2, 0),
    }
    assert edit.segments[4].tokens == other.tokens[3 * SIZE :]
    assert edit.frozen().next_id == 5
    assert [s.id for s, _, _ in walk(edit.view(), PATH)] == [1, 3, 2]
    assert [s.id for s, _, _ in walk(edit.view(), other)] == [1, 3, 4]


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_pages_that_have_a_place_get_no_other(stop: int) -> None:
    edit = extended(2)
    edit.extend(PATH, 4, now=7, priority=1)
    index = edit.frozen()
    again = IndexEdit(index)
    again.extend(PATH, stop, now=9, priority=9)
    assert again.frozen() is index


def test_a_path_that_ends_inside_a_segment_needs_no_split() -> None:
    index = extended(4).frozen()
    again = IndexEdit(index)
    again.extend(_prompt(1, 2, 9), 2, now=9, priority=9)
    assert again.frozen() is index
    again.extend(_prompt(1, 2, 9), 3, now=9, priority=9)
    assert len(again.segments) == 3


def test_a_second_namespace_has_a_tree_of_its_own() -> None:
    edit = extended(2)
    edit.extend(_prompt(1, 2, namespace=BLUE), 2, now=6, priority=0)
    assert edit.segments[2].parent == ROOT
    assert edit.segments[2].namespace == BLUE
    assert len(edit.child_by_key) == 2


def test_a_split_keeps_everything_on_both_sides() -> None:
    edit = filled()
    whole = evolve(
        edit.segments[1],
        stored=True,
        device_pins=1,
        mirroring=True,
        persisting=True,
        used=8,
        n_uses=4,
        host_stale=True,
    )
    edit._put(whole)
    (upper,) = edit.cover(PATH, 1, 3)
    (first,) = (s for s in edit.segments.values() if s.parent == ROOT)
    (last,) = (s for s in edit.segments.values() if s.parent == upper.id)
    assert [s.n_pages for s in (first, upper, last)] == [1, 2, 1]
    assert last.id == 1, "the lowest part keeps the id"
    for segment, start, stop in ((first, 0, 1), (upper, 1, 3), (last, 3, 4)):
        assert segment.tokens == PATH.tokens[start * SIZE : stop * SIZE]
        assert segment.device == devices(10, 11, 12, 13)[start:stop]
        assert segment.host == hosts(20, 21, 22, 23)[start:stop]
        same = ("stored", "device_pins", "mirroring", "persisting", "used", "n_uses", "host_stale")
        assert all(getattr(segment, name) == getattr(whole, name) for name in same)
    assert [s.n_children for s in (first, upper, last)] == [1, 1, 0]
    assert counts(edit) == (4, 0, 4, 4)
    assert edit.frozen().next_id == 4
    assert len(edit.child_by_key) == 3


def test_a_split_below_another_segment_is_found_from_there() -> None:
    edit = extended(2)
    edit.extend(PATH, 4, now=7, priority=1)
    list(edit.cover(PATH, 3, 4))
    assert [(s.id, start, n) for s, start, n in walk(edit.view(), PATH)] == [
        (1, 0, 2),
        (3, 2, 1),
        (2, 3, 1),
    ]


def test_a_cover_is_exactly_the_pages() -> None:
    for start in range(5):
        for stop in range(5):
            edit = extended(2)
            edit.extend(PATH, 4, now=7, priority=1)
            found = list(edit.cover(PATH, start, stop))
            assert sum(s.n_pages for s in found) == max(0, stop - start)
            tokens = b"".join(s.tokens for s in found)
            assert tokens == PATH.tokens[start * SIZE : max(start, stop) * SIZE]
            if start >= stop:
                assert len(edit.segments) == 2


def test_pages_without_a_place_cannot_be_covered() -> None:
    edit = extended(4)
    with pytest.raises(AssertionError, match="the pages are not in the index"):
        list(edit.cover(_prompt(1, 2, 9, 9), 0, 4))


# Use.


def test_only_pages_that_are_placed_and_asked_for_were_of_use() -> None:
    edit = extended(3)
    edit.set_device(edit.segments[1], devices(1, 2, 3))
    edit.touch(PATH, 2, now=9, priority=2)
    used = {s.n_pages: (s.used, s.n_uses, s.priority) for s in edit.segments.values()}
    assert used == {2: (9, 1, 3), 1: (5, 0, 3)}
    edit.touch(PATH, 4, now=11, priority=7)
    used = {s.n_pages: (s.used, s.n_uses, s.priority) for s in edit.segments.values()}
    assert used == {2: (11, 2, 7), 1: (11, 1, 7)}
    edit.touch(_prompt(1, 2, 9), 3, now=12, priority=0)
    used = {s.n_pages: (s.used, s.n_uses, s.priority) for s in edit.segments.values()}
    assert used == {2: (12, 3, 7), 1: (11, 1, 7)}


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_pins_are_counted_for_each_tier_and_take_pages_from_the_idle_ones(tier: Tier) -> None:
    edit = filled()
    edit.pin(tier, PATH, 0, 4)
    edit.pin(tier, PATH, 0, 4)
    pins = (2, 0) if tier is Tier.DEVICE else (0, 2)
    assert (edit.segments[1].device_pins, edit.segments[1].host_pins) == pins
    assert counts(edit) == ((4, 0, 4, 4) if tier is Tier.DEVICE else (4, 4, 4, 0))
    edit.unpin(tier, PATH, 0, 4)
    assert counts(edit) == ((4, 0, 4, 4) if tier is Tier.DEVICE else (4, 4, 4, 0))
    edit.unpin(tier, PATH, 0, 4)
    assert counts(edit) == (4, 4, 4, 4)
    with pytest.raises(AssertionError, match="a pin that nobody held"):
        edit.unpin(tier, PATH, 0, 4)


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_a_flushed_page_goes_with_its_last_pin(tier: Tier) -> None:
    edit = filled()
    edit.pin(tier, PATH, 0, 4)
    edit.pin(tier, PATH, 0, 2)
    edit.flush(tier)
    freed = edit.freed_device if tier is Tier.DEVICE else edit.freed_host
    stale = [(s.device_stale, s.host_stale) for s in edit.segments.values()]
    assert set(stale) == {(tier is Tier.DEVICE, tier is Tier.HOST)}
    assert freed == []
    edit.unpin(tier, PATH, 0, 2)
    assert freed == []
    edit.unpin(tier, PATH, 0, 4)
    first = 10 if tier is Tier.DEVICE else 20
    assert sorted(freed) == [first, first + 1, first + 2, first + 3]
    assert [(s.device_stale, s.host_stale) for s in edit.segments.values()] == [
        (False, False),
        (False, False),
    ]
    assert counts(edit) == ((0, 0, 4, 4) if tier is Tier.DEVICE else (4, 4, 0, 0))
    other = edit.freed_host if tier is Tier.DEVICE else edit.freed_device
    assert other == []


def test_what_is_in_neither_tier_is_not_marked_by_a_flush() -> None:
    edit = extended()
    edit.set_device(edit.segments[1], devices(1, 2, 3, 4))
    edit.pin(Tier.HOST, PATH, 0, 4)
    edit.flush(Tier.HOST)
    assert not edit.segments[1].host_stale
    edit.flush(Tier.DEVICE)
    assert not edit.segments[1].device_stale
    assert edit.segments[1].device is None
    edit.flush(Tier.DEVICE)
    assert not edit.segments[1].device_stale


def test_a_page_that_comes_anew_is_not_stale() -> None:
    edit = filled()
    edit.pin(Tier.DEVICE, PATH, 0, 4)
    edit.pin(Tier.HOST, PATH, 0, 4)
    edit.flush(Tier.DEVICE)
    edit.flush(Tier.HOST)
    edit.set_device(edit.segments[1], devices(1, 2, 3, 4))
    edit.set_host(edit.segments[1], hosts(1, 2, 3, 4))
    assert (edit.segments[1].device_stale, edit.segments[1].host_stale) == (False, False)


def test_marks_are_set_and_taken_away_alone() -> None:
    edit = filled()
    before = edit.segments[1]
    for mark, field in (
        (edit.mark_stored, "stored"),
        (edit.mark_mirroring, "mirroring"),
        (edit.mark_persisting, "persisting"),
    ):
        mark(before, Switch.ON)
        changed: dict[str, Any] = {field: True}
        assert edit.segments[1] == evolve(before, **changed)
        mark(before, Switch.OFF)
        assert edit.segments[1] == before


def test_storage_that_was_flushed_has_nothing() -> None:
    edit = filled()
    edit.mark_stored(edit.segments[1], Switch.ON)
    edit.flush_stored()
    assert not edit.segments[1].stored
    index = edit.frozen()
    again = IndexEdit(index)
    again.flush_stored()
    assert again.frozen() is index, "nothing was stored"


def test_a_flush_goes_on_behind_segments_that_went_with_others() -> None:
    """The front half has no copies of its own: it goes with the back half, before its own turn."""
    edit = extended()
    (back,) = list(edit.cover(PATH, 2, 4))
    edit.set_device(back, devices(12, 13))
    edit.extend(_prompt(1, 2, namespace=BLUE), 2, now=6, priority=3)
    last = list(edit.segments.values())[-1]
    edit.set_device(last, devices(14, 15))
    edit.flush(Tier.DEVICE)
    assert dict(edit.segments) == {}
    assert sorted(edit.freed_device) == [12, 13, 14, 15]
