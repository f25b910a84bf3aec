"""A plan is a partition, and it changes in one way only."""

import itertools

import hypothesis.strategies as st
from hypothesis import given

from kvlift.core.ids import DeviceHandle
from kvlift.core.plan import (
    Bounds,
    Lease,
    Plan,
    Span,
    spans_arrived,
    spans_outside,
    with_own,
)
from kvlift.core.tier import Source

PAGE = st.integers(0, 12)
BOUNDS = st.lists(PAGE, min_size=4, max_size=4).map(
    lambda cuts: Bounds(
        device=sorted(cuts)[0],
        shared=sorted(cuts)[1],
        host=sorted(cuts)[2],
        storage=sorted(cuts)[3],
    )
)
SPANS = st.lists(
    st.tuples(PAGE, PAGE).map(lambda ends: Span(min(ends), max(ends) + 1)), max_size=5
).map(tuple)


def _pages(spans: tuple[Span, ...]) -> list[int]:
    return [page for span in spans for page in range(span.start, span.stop)]


@given(BOUNDS, PAGE)
def test_a_cut_moves_boundaries_to_the_left_and_keeps_what_is_pinned(b: Bounds, page: int) -> None:
    cut = b.cut_at(page)
    assert cut.device == b.device
    assert cut.device <= cut.shared <= cut.host <= cut.storage <= max(page, b.device)
    assert cut.shared <= b.shared
    assert cut.host <= b.host
    assert cut.storage <= b.storage
    assert cut.cut_at(page) == cut, "once is enough"


@given(BOUNDS, PAGE, st.sampled_from([Source.PEER, Source.RECOMPUTE]))
def test_the_sources_of_a_plan_add_up(b: Bounds, more: int, rest: Source) -> None:
    n_pages = b.storage + more
    counts = Plan(bounds=b, n_pages=n_pages, promise=0, rest=rest).n_pages_by_source()
    assert sum(counts.values()) == n_pages
    assert min(counts.values()) >= 0
    assert counts[rest] == more


@given(PAGE, PAGE, SPANS)
def test_what_lies_outside_is_all_that_no_span_covers(
    start: int, stop: int, taken: tuple[Span, ...]
) -> None:
    found = spans_outside(start, stop, taken)
    assert _pages(found) == [page for page in range(start, stop) if page not in _pages(taken)]
    assert all(span.n_pages > 0 for span in found)
    assert all(a.stop < b.start for a, b in itertools.pairwise(found)), "none side by side"


@given(SPANS, st.integers(0, 60))
def test_pages_arrive_in_the_order_of_the_wants(wanted: tuple[Span, ...], n_arrived: int) -> None:
    assert _pages(spans_arrived(wanted, n_arrived)) == _pages(wanted)[:n_arrived]


@given(PAGE, st.integers(1, 8), st.data())
def test_a_lease_names_its_own_pages_by_their_place(
    n_shared: int, n: int, data: st.DataObject
) -> None:
    lease = Lease(n_shared=n_shared, own=tuple(DeviceHandle(h) for h in range(n)))
    start = data.draw(st.integers(n_shared, n_shared + n))
    stop = data.draw(st.integers(start, n_shared + n))
    assert lease.pages(start, stop) == tuple(range(start - n_shared, stop - n_shared))
    new = tuple(DeviceHandle(100 + h) for h in range(stop - start))
    swapped = with_own(lease, start, new)
    assert swapped.pages(start, stop) == new
    assert len(swapped.own) == n
    assert swapped.pages(n_shared, start) == lease.pages(n_shared, start)
