"""A tick of a story in words: what landed, what was agreed, what changed, what was started."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from kvlift.testing.sim_rank import SimRank
from kvlift.testing.story_view import RankView


def tick_lines(
    number: int,
    ranks: Sequence[SimRank],
    words_before: Sequence[Mapping[str, frozenset[str]]],
    views: Sequence[RankView],
) -> Iterator[str]:
    """One line for each thing that happened on each rank; nothing for what did not."""
    yield f"tick {number}"
    for place, (rank, view) in enumerate(zip(ranks, views, strict=True)):
        prefix = f"  rank {place}  "
        for outbox in (rank.store.outbox, rank.copies.outbox, rank.peers.outbox):
            for report in outbox.last:
                yield f"{prefix}event    {report}"
        verdict = rank.ranks.last_verdict
        if verdict is not None:
            yield f"{prefix}verdict  {_shortened(verdict)}"
            rank.ranks.last_verdict = None
        before = words_before[place] if place < len(words_before) else {}
        for rid in sorted({*before, *view.words}):
            old, new = before.get(rid, frozenset()), view.words.get(rid, frozenset())
            if old != new:
                yield f"{prefix}phase    {rid}: {_said(old)} -> {_said(new)}"
        for name, n_times in Counter(rank.effects()).items():
            yield f"{prefix}effect   {name}" + (f" x{n_times}" if n_times > 1 else "")


def _said(words: frozenset[str]) -> str:
    return "/".join(sorted(words)) or "-"


def _shortened(verdict: tuple[int, ...]) -> str:
    """Without the zeros of empty slots at its end."""
    length = max((place + 1 for place, number in enumerate(verdict) if number), default=0)
    return " ".join(str(number) for number in verdict[:length])
