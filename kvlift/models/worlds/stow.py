"""Storage: what counts as stored is stored, and nothing is stored behind a hole."""

from collections.abc import Iterator, Sequence

from attrs import define

from kvlift.core.agreed import Agreed
from kvlift.core.index import Segment
from kvlift.core.local import Limits
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.models.claim import Always, Claim
from kvlift.models.worlds import goals
from kvlift.models.worlds.ghost import Doing, Rank, Tag
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.opening import Placed, Put
from kvlift.models.worlds.situation import Goal, Situation
from kvlift.models.worlds.stage import Now
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2, 2, 3, 3)
B = prompt_of(1, 1, 4, 4)

PAGE_BYTES = A.page_bytes()
SHORT_WRITE = Goal(
    name="only a part of what is written gets there",
    is_reached_on=lambda rank: 0 < len(rank.stored) < A.n_pages,
)


@define(eq=False)
class Stowing(Situation):
    """A situation that looks into storage as well."""

    def claims(self) -> Sequence[Claim[Now]]:
        if not self._claims:
            super().claims()
            agreed, ranks = self.stage.agreed, self.stage.ranks
            self._claims.append(Always("what counts as stored is stored", lambda now: all(
                _is_stored(agreed[now.agreed], ranks[rank]) for rank in now.ranks)))  # fmt: skip
            self._claims.append(Always("no stored page lies behind a hole", lambda now: all(
                _has_no_hole(ranks[rank].stored) for rank in now.ranks)))  # fmt: skip
            self._claims.append(Always("a storage that is gone has nothing", lambda now: (
                _is_forgotten(agreed[now.agreed]))))  # fmt: skip
        return self._claims


def _is_stored(agreed: Agreed, rank: Rank) -> bool:
    return all(tag in rank.stored for tag in _believed(agreed))


def _believed(agreed: Agreed) -> Iterator[Tag]:
    """What each page holds that the index says is in storage."""
    segments = agreed.index.segments
    for segment in segments.values():
        if segment.stored:
            before = _tokens_before(agreed, segment)
            for at in range(segment.n_pages):
                yield segment.namespace + before + segment.tokens[: (at + 1) * PAGE_BYTES]


def _tokens_before(agreed: Agreed, segment: Segment) -> bytes:
    before = b""
    while segment.parent:
        segment = agreed.index.segments[segment.parent]
        before = segment.tokens + before
    return before


def _has_no_hole(stored: frozenset[Tag]) -> bool:
    first = len(A.namespace) + PAGE_BYTES
    return all(len(tag) == first or tag[:-PAGE_BYTES] in stored for tag in stored)


def _is_forgotten(agreed: Agreed) -> bool:
    return agreed.storage is Switch.ON or not any(_believed(agreed))


def stow(*, deep: bool) -> Stowing:
    """Writes that come up short, a storage that goes and comes back, device pages that leave.

    Without a flush of storage: a write that is under way then may land before or after it."""
    return Stowing(
        name="stow",
        lives=(
            Life(rid="A", prompt=A, story="pages=3", is_first=True),
            Life(rid="B", prompt=B, story="from=A[0:1] pages=2", after="A"),
        ),
        policy=Policy(
            n_device_pages=4,
            n_host_pages=2,
            write=WritePolicy.THROUGH if deep else WritePolicy.NONE,
        ),
        limits=Limits(),
        climate=Climate(has_pieces=False, has_prompt_peer=True),
        preamble=f"world page=2 device=4 host=2\nconfig write={'through' if deep else 'none'}",
        n_faults=3 if deep else 2,
        others=("flush device", "detach storage", "attach storage"),
        goals=(goals.READY, SHORT_WRITE),
    )


def wiped(*, deep: bool) -> Stowing:
    """Storage is flushed while lookups, reads and writes of the same page are under way.

    A page each: of two, a write that is under way may bring the second one after the first has
    been forgotten."""
    one = prompt_of(1, 1)
    return Stowing(
        name="wiped",
        n_together=2,
        lives=(
            Life(rid="A", prompt=one, story="pages=1", is_first=True),
            Life(rid="B", prompt=one, story="from=A[0:1] pages=1", n_lives=2 if deep else 1),
        ),
        policy=Policy(n_device_pages=2, n_host_pages=1, write=WritePolicy.NONE),
        limits=Limits(),
        climate=Climate(has_pieces=False, has_failures=deep),
        preamble="world page=2 device=2 host=1\nconfig write=none",
        putting="\nput A in storage",
        puts=(Put(prompt=one, start=0, stop=1, place=Placed.STORAGE),),
        n_ranks=2 if deep else 1,
        n_faults=2,
        others=("flush all", "detach storage", "attach storage"),
        goals=(goals.READY, WRITTEN_AGAIN),
    )


WRITTEN_AGAIN = Goal(
    name="a page is written that storage has forgotten",
    is_reached_on=lambda rank: any(
        one.doing is Doing.PERSIST and one.tags[0] not in rank.stored for one in rank.operations
    ),
)
