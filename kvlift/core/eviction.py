"""What leaves a tier, and in which order: leaves first, by policy, never anything pinned.

A page may only leave when no page behind it is in the same tier and free to go: a prefix is worth
more than what hangs on it. The order is computed from agreed instants and segment ids alone.
"""

import heapq
from collections.abc import Callable, Iterable
from typing import assert_never

from kvlift.core.index import Segment
from kvlift.core.policy import EvictionPolicy
from kvlift.core.tier import Tier

Order = tuple[int, int, int]


def order_of(policy: EvictionPolicy) -> Callable[[Segment], Order]:
    """The policy as a sort key: the smallest leaves first."""
    match policy:
        case EvictionPolicy.LRU:
            return lambda segment: (segment.used, 0, segment.id)
        case EvictionPolicy.LFU:
            return lambda segment: (segment.n_uses, segment.used, segment.id)
        case EvictionPolicy.FIFO:
            return lambda segment: (segment.born, 0, segment.id)
        case EvictionPolicy.PRIORITY:
            return lambda segment: (segment.priority, segment.used, segment.id)
        case _:
            assert_never(policy)


def is_idle(segment: Segment, tier: Tier) -> bool:
    """Resident in the tier, and nobody needs it there."""
    if tier is Tier.DEVICE:
        return segment.device is not None and segment.device_pins == 0
    return segment.host is not None and segment.host_pins == 0


def victims(
    segments: Iterable[Segment],
    parent_of: Callable[[Segment], Segment | None],
    *,
    tier: Tier,
    n_pages: int,
    policy: EvictionPolicy,
    may_go: Callable[[Segment], bool],
) -> list[tuple[Segment, int]]:
    """Segments to forget in `tier`, each with how many pages of its tail: `n_pages`, or all.

    A parent becomes a leaf when its last idle resident child has gone.
    """
    key = order_of(policy)
    idle = {s.id: s for s in segments if is_idle(s, tier) and may_go(s)}
    n_below: dict[int, int] = {}
    for segment in idle.values():
        n_below[segment.parent] = n_below.get(segment.parent, 0) + 1
    heap = [(key(s), s.id) for s in idle.values() if s.id not in n_below]
    heapq.heapify(heap)
    chosen: list[tuple[Segment, int]] = []
    n_chosen = 0
    while heap and n_chosen < n_pages:
        segment = idle[heapq.heappop(heap)[1]]
        n_taken = min(segment.n_pages, n_pages - n_chosen)
        chosen.append((segment, n_taken))
        n_chosen += n_taken
        parent = parent_of(segment)
        if parent is None or n_taken < segment.n_pages:
            continue
        n_below[parent.id] -= 1
        if n_below[parent.id] == 0 and parent.id in idle:
            heapq.heappush(heap, (key(parent), parent.id))
    return chosen
