"""What the measured rates allow: the same arrivals replayed with a free decode side.

Prefill computes one prompt after the other, in the seconds that were measured for its chunks. The
link carries pages in the order of requests, each once it is computed, at its rate. Restores go one
after the other at the rate measured alone, reads from storage likewise, and a read's restore costs
nothing beside it. Nothing waits for a tick, for room, or for a decode step.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate

from attrs import define, frozen

from kvlift.cli.benches.ttft.machine import Rates
from kvlift.cli.benches.ttft.play import GBPS
from kvlift.cli.benches.ttft.workload import Turn

PIECE_PAGES = 16


@frozen
class Asked:
    """One request as the replay sees it: what it had to compute, and where its pages were."""

    turn: Turn
    n_pages: int
    chunks_s: tuple[float, ...]
    n_host: int
    n_storage: int
    n_peer: int


@define
class _Transfer:
    """Pages of one request on their way: when each piece can leave."""

    pieces: deque[tuple[float, int]]
    landed_s: float = 0.0


def allowed_ttfts(
    asked: Sequence[Asked], rates: Rates, gbps: float, page_bytes: int, chunk_pages: int
) -> dict[str, float]:
    """Seconds from arrival to ready of each request, by its id; `asked` in order of arrival."""
    computed = _computed(asked)
    transfers = _transfers(asked, computed, chunk_pages)
    _carry(list(transfers.values()), page_bytes / (gbps * GBPS))
    restored = _restored(asked, rates, page_bytes)
    ttfts = {}
    for each in asked:
        rid = each.turn.rid
        ready_s = max(computed[rid][-1], transfers[rid].landed_s, restored[rid])
        ttfts[rid] = ready_s - each.turn.arrival_s
    return ttfts


def _computed(asked: Sequence[Asked]) -> dict[str, list[float]]:
    """When each chunk of each request is computed."""
    ends: dict[str, list[float]] = {}
    free_s = 0.0
    for each in asked:
        begin_s = max(free_s, each.turn.arrival_s)
        ends[each.turn.rid] = list(accumulate(each.chunks_s, initial=begin_s))[1:]
        free_s = ends[each.turn.rid][-1]
    return ends


def _transfers(
    asked: Sequence[Asked], computed: Mapping[str, list[float]], chunk_pages: int
) -> dict[str, _Transfer]:
    """Wanted are the last `n_peer` pages; prefill's last chunks are computed last."""
    by_conversation: dict[int, list[float]] = {}
    transfers = {}
    for each in asked:
        times = by_conversation.setdefault(each.turn.conversation, [])
        n_new = each.n_pages - len(times)
        ends = computed[each.turn.rid]
        times += [ends[min(page // chunk_pages, len(ends) - 1)] for page in range(n_new)]
        wanted = range(each.n_pages - each.n_peer, each.n_pages)
        pieces: deque[tuple[float, int]] = deque()
        for page in wanted:
            leaves_s = max(times[page], each.turn.arrival_s)
            if pieces and pieces[-1][0] == leaves_s and pieces[-1][1] < PIECE_PAGES:
                pieces[-1] = (leaves_s, pieces[-1][1] + 1)
            else:
                pieces.append((leaves_s, 1))
        transfers[each.turn.rid] = _Transfer(pieces)
    return transfers


def _carry(transfers: Sequence[_Transfer], page_s: float) -> None:
    """Work-conserving: the first request with a piece that can leave now has the link."""
    now_s = 0.0
    left = [transfer for transfer in transfers if transfer.pieces]
    while left:
        chosen = next((one for one in left if one.pieces[0][0] <= now_s), None)
        if chosen is None:
            now_s = min(one.pieces[0][0] for one in left)
            continue
        _, n_pages = chosen.pieces.popleft()
        now_s += n_pages * page_s
        chosen.landed_s = now_s
        if not chosen.pieces:
            left.remove(chosen)


def _restored(asked: Sequence[Asked], rates: Rates, page_bytes: int) -> dict[str, float]:
    ends = {}
    copy_free_s = read_free_s = 0.0
    for each in asked:
        end_s = arrival_s = each.turn.arrival_s
        if each.n_host:
            copy_free_s = max(copy_free_s, arrival_s)
            copy_free_s += each.n_host * page_bytes / rates.restore_bytes_s
            end_s = copy_free_s
        if each.n_storage:
            slower = min(rates.restore_bytes_s, rates.storage_bytes_s)
            read_free_s = max(read_free_s, arrival_s) + each.n_storage * page_bytes / slower
            end_s = max(end_s, read_free_s)
        ends[each.turn.rid] = end_s
    return ends
