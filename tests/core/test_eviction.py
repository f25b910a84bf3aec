"""Who leaves: beside a list that is sorted anew for every page."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvlift.core.eviction import is_idle, order_of, victims
from kvlift.core.ids import DeviceHandle
from kvlift.core.index import ROOT, Segment
from kvlift.core.policy import EvictionPolicy
from kvlift.core.tier import Tier


def _segment(number: int, parent: int, n_pages: int, **fields: int) -> Segment:
    handles = tuple(DeviceHandle(100 * number + n) for n in range(n_pages))
    return Segment(
        id=number,
        parent=parent,
        namespace=b"",
        tokens=bytes(4 * n_pages),
        n_pages=n_pages,
        device=None if fields.pop("gone", 0) else handles,
        device_pins=fields.pop("pins", 0),
        **fields,  # type: ignore[arg-type]
    )


@st.composite
def _forests(draw: st.DrawFn) -> list[Segment]:
    made: list[Segment] = []
    small = st.integers(0, 3)
    for number in range(1, draw(st.integers(1, 8)) + 1):
        parent = draw(st.integers(0, number - 1))
        made.append(
            _segment(
                number,
                parent if parent else ROOT,
                draw(st.integers(1, 3)),
                pins=int(draw(st.booleans()) and draw(st.booleans())),
                gone=int(draw(small) == 0),
                used=draw(small),
                born=draw(small),
                n_uses=draw(small),
                priority=draw(small),
            )
        )
    return made


def _one_by_one(segments: list[Segment], n_pages: int, policy: EvictionPolicy) -> list[int]:
    """Page by page: of all segments without an idle child, the first by policy loses its last."""
    left = {s.id: s.n_pages for s in segments if is_idle(s, Tier.DEVICE)}
    by_id = {s.id: s for s in segments}
    taken: list[int] = []
    while left and len(taken) < n_pages:
        leaves = [i for i in left if not any(by_id[j].parent == i for j in left)]
        first = min(leaves, key=lambda i: order_of(policy)(by_id[i]))
        taken.append(first)
        left[first] -= 1
        if not left[first]:
            del left[first]
    return taken


@pytest.mark.parametrize("policy", list(EvictionPolicy))
@given(segments=_forests(), n_pages=st.integers(0, 12))
def test_pages_leave_as_if_chosen_one_by_one(
    policy: EvictionPolicy, segments: list[Segment], n_pages: int
) -> None:
    by_id = {s.id: s for s in segments}
    chosen = victims(
        segments,
        lambda s: by_id.get(s.parent),
        tier=Tier.DEVICE,
        n_pages=n_pages,
        policy=policy,
        may_go=lambda _s: True,
    )
    found = [segment.id for segment, n_taken in chosen for _ in range(n_taken)]
    assert found == _one_by_one(segments, n_pages, policy)


@pytest.mark.parametrize(
    ("policy", "first"),
    [
        (EvictionPolicy.LRU, 1),
        (EvictionPolicy.LFU, 2),
        (EvictionPolicy.FIFO, 3),
        (EvictionPolicy.PRIORITY, 4),
    ],
)
def test_each_policy_has_its_own_first(policy: EvictionPolicy, first: int) -> None:
    segments = [
        _segment(1, ROOT, 1, used=1, n_uses=5, born=5, priority=5),
        _segment(2, ROOT, 1, used=5, n_uses=1, born=5, priority=5),
        _segment(3, ROOT, 1, used=5, n_uses=5, born=1, priority=5),
        _segment(4, ROOT, 1, used=5, n_uses=5, born=5, priority=1),
    ]
    assert _one_by_one(segments, 1, policy) == [first]
    assert min(segments, key=order_of(policy)).id == first
