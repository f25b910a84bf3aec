"""What leaves the index, and what is found in it."""

from typing import Any

import pytest
from attrs import evolve

from kvlift.core.eviction import is_idle, victims
from kvlift.core.index import (
    Hit,
    Segment,
    device_pages,
    host_hit,
    host_pages,
    match,
    n_pages_common,
)
from kvlift.core.policy import EvictionPolicy
from kvlift.core.tier import Tier
from tests.core.test_index import PAGE, _prompt
from tests.core.test_index_edit import PATH, SIZE, devices, extended, filled, hosts

# Leaving.


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_a_forgotten_copy_is_freed_and_the_other_stays(tier: Tier) -> None:
    edit = filled()
    edit.forget(tier, edit.segments[1])
    gone = (devices(10, 11, 12, 13), ()) if tier is Tier.DEVICE else ((), hosts(20, 21, 22, 23))
    assert (tuple(edit.freed_device), tuple(edit.freed_host)) == gone
    segment = edit.segments[1]
    assert (segment.device is None, segment.host is None) == (
        tier is Tier.DEVICE,
        tier is Tier.HOST,
    )
    other = Tier.HOST if tier is Tier.DEVICE else Tier.DEVICE
    edit.forget(other, segment)
    assert dict(edit.segments) == {}
    assert dict(edit.child_by_key) == {}


def test_a_parent_goes_when_nothing_is_left_below_it() -> None:
    edit = extended(2)
    edit.extend(PATH, 4, now=7, priority=1)
    edit.set_device(edit.segments[2], devices(1, 2))
    edit.forget(Tier.DEVICE, edit.segments[2])
    assert dict(edit.segments) == {}
    assert dict(edit.child_by_key) == {}


def test_a_segment_is_bare_when_it_has_no_copy_no_child_and_no_pin() -> None:
    bare = Segment(id=1, parent=0, namespace=b"", tokens=b"ab", n_pages=1, stored=True)
    assert bare.is_bare()
    assert not evolve(bare, device=devices(1)).is_bare()
    assert not evolve(bare, host=hosts(1)).is_bare()
    assert not evolve(bare, n_children=1).is_bare()
    assert not evolve(bare, device_pins=1).is_bare()
    assert not evolve(bare, host_pins=1).is_bare()


def test_a_segment_is_dirty_on_the_device_alone() -> None:
    dirty = Segment(id=1, parent=0, namespace=b"", tokens=b"ab", n_pages=1, device=devices(1))
    assert dirty.is_dirty()
    assert not evolve(dirty, device=None).is_dirty()
    assert not evolve(dirty, host=hosts(1)).is_dirty()
    assert not evolve(dirty, stored=True).is_dirty()


@pytest.mark.parametrize("n_pages", range(6))
def test_eviction_takes_the_tail_first_and_no_more_than_asked(n_pages: int) -> None:
    edit = filled()
    assert edit.evict(Tier.DEVICE, n_pages, EvictionPolicy.LRU) == min(4, n_pages)
    assert sorted(edit.freed_device) == list(range(14 - min(4, n_pages), 14))
    assert match(edit.view(), PATH) == Hit(4 - min(4, n_pages), 4)


def test_eviction_spares_what_may_not_go() -> None:
    edit = extended(2)
    edit.extend(PATH, 4, now=7, priority=1)
    edit.set_device(edit.segments[1], devices(1, 2))
    edit.set_device(edit.segments[2], devices(3, 4))
    gone = edit.evict(Tier.DEVICE, 9, EvictionPolicy.LRU, lambda segment: segment.id == 1)
    assert gone == 2
    assert edit.freed_device == list(devices(1, 2))
    assert edit.evict(Tier.HOST, 9, EvictionPolicy.LRU) == 0


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_a_page_is_idle_in_the_tier_where_it_is_and_nobody_pins_it(tier: Tier) -> None:
    held = Segment(
        id=1, parent=0, namespace=b"", tokens=b"ab", n_pages=1, device=devices(1), host=hosts(1)
    )
    here = ("device", "device_pins") if tier is Tier.DEVICE else ("host", "host_pins")
    there = ("host", "host_pins") if tier is Tier.DEVICE else ("device", "device_pins")
    assert is_idle(held, tier)
    changes: list[dict[str, Any]] = [{there[0]: None, there[1]: 1}, {here[0]: None}, {here[1]: 1}]
    idle = [is_idle(evolve(held, **change), tier) for change in changes]
    assert idle == [True, False, False]


def test_a_parent_whose_page_is_still_needed_below_stays() -> None:
    top = Segment(id=1, parent=0, namespace=b"", tokens=b"ab", n_pages=1, device=devices(1))
    children = [
        evolve(top, id=2, parent=1, device=devices(2), used=9),
        evolve(top, id=3, parent=1, device=devices(3), used=4),
    ]
    by_id = {s.id: s for s in (top, *children)}

    def chosen(n_pages: int) -> list[int]:
        found = victims(
            by_id.values(),
            lambda s: by_id.get(s.parent),
            tier=Tier.DEVICE,
            n_pages=n_pages,
            policy=EvictionPolicy.LRU,
            may_go=lambda s: True,
        )
        return [s.id for s, _ in found]

    assert [chosen(n) for n in range(4)] == [[], [3], [3, 2], [3, 2, 1]]


# Questions.


def test_a_prefix_is_found_to_its_first_hole_in_each_tier() -> None:
    edit = filled()
    (third,) = edit.cover(PATH, 2, 3)
    edit.forget(Tier.DEVICE, edit.segments[third.id])
    assert match(edit.view(), PATH) == Hit(2, 4)
    (fourth,) = edit.cover(PATH, 3, 4)
    edit.forget(Tier.HOST, edit.segments[fourth.id])
    assert match(edit.view(), PATH) == Hit(2, 3), "the device page behind the hole is no hit"
    edit.pin(Tier.HOST, PATH, 2, 3)
    edit.flush(Tier.HOST)
    assert match(edit.view(), PATH) == Hit(2, 2)
    edit.pin(Tier.DEVICE, PATH, 1, 2)
    edit.flush(Tier.DEVICE)
    assert match(edit.view(), PATH) == Hit(0, 0)


def test_pages_are_named_by_their_place() -> None:
    edit = filled()
    list(edit.cover(PATH, 1, 3))
    view = edit.view()
    for stop in range(5):
        assert device_pages(view, PATH, stop) == devices(10, 11, 12, 13)[:stop]
        for start in range(stop + 1):
            assert host_pages(view, PATH, start, stop) == hosts(20, 21, 22, 23)[start:stop]
    edit.forget(Tier.HOST, edit.segments[1])
    with pytest.raises(AssertionError, match="2 host pages asked for, the index has 1"):
        host_pages(edit.view(), PATH, 2, 4)


@pytest.mark.parametrize("n_same", range(5))
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_common_pages_are_counted_from_the_offset(n_same: int, offset: int) -> None:
    (segment, *_), tail = tuple(extended().segments.values()), _prompt(8, 8, 8, 8)
    before = bytes(offset * SIZE)
    tokens = before + PATH.tokens[: n_same * SIZE] + tail.tokens[n_same * SIZE :]
    assert n_pages_common(tokens, offset * SIZE, segment, SIZE) == n_same
    cut = before + PATH.tokens[: n_same * SIZE]
    assert n_pages_common(cut, offset * SIZE, segment, SIZE) == n_same
    assert PAGE == 2


def test_a_run_of_host_copies_ends_at_its_first_hole() -> None:
    edit = extended()
    for start, stop in ((1, 2), (2, 3)):
        (segment,) = edit.cover(PATH, start, stop)
        edit.set_host(segment, hosts(start))
    assert [host_hit(edit.view(), PATH, start) for start in range(5)] == [0, 3, 3, 3, 4]
    edit.pin(Tier.HOST, PATH, 2, 3)
    edit.flush(Tier.HOST)
    assert [host_hit(edit.view(), PATH, start) for start in range(4)] == [0, 1, 2, 3]
    whole = filled().view()
    assert [host_hit(whole, PATH, start) for start in range(5)] == [4, 4, 4, 4, 4]
    assert host_hit(whole, _prompt(1, 2, 9), 1) == 2
