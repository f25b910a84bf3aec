"""One request whose pages come from every tier at once; and the same without any fault."""

from collections.abc import Callable, Sequence

from attrs import define, field

from kvlift.core.agreed import Agreed
from kvlift.core.landed import PeerCause
from kvlift.core.local import Limits
from kvlift.core.phase import Asking, Filling, Waiting
from kvlift.core.policy import Policy, PrefetchPolicy, Switch, WritePolicy
from kvlift.models.claim import AlwaysStep, Claim
from kvlift.models.memo import memo
from kvlift.models.worlds import goals
from kvlift.models.worlds.ghost import Tag, tag_of
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.opening import Placed, Put
from kvlift.models.worlds.paths import pages_of
from kvlift.models.worlds.situation import Situation
from kvlift.models.worlds.stage import Now
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2, 2, 3, 3, 4, 4)
B = prompt_of(1, 1, 2, 2, 5)
SHORT = prompt_of(1, 1)
OTHER = prompt_of(7, 7)

_PUTS = (
    Put(prompt=A, start=0, stop=1, place=Placed.HOST),
    Put(prompt=A, start=1, stop=3, place=Placed.STORAGE),
)
_PUT_LINES = "\nput A[0:1] in host\nput A[1:3] in storage"


def restore(*, deep: bool) -> Situation:
    """One request, all tiers: landings late, in part or failing, an abort at any moment."""
    return Situation(
        name="restore",
        n_together=2,
        lives=(Life(rid="A", prompt=A, story="pages=4", may_abort=True),),
        policy=Policy(n_device_pages=4, n_host_pages=3, write=WritePolicy.NONE, persist=Switch.OFF),
        limits=Limits(),
        climate=Climate(
            has_silence=True,
            has_echoes=True,
            peer_failures=frozenset({PeerCause.GONE, PeerCause.LOST}),
        ),
        preamble="world page=2 device=4 host=3\nconfig write=none persist=off",
        putting=_PUT_LINES,
        puts=_PUTS,
        n_faults=2 if deep else 1,
        goals=(
            goals.READY,
            goals.DRAINS,
            goals.WIDENS,
            goals.READ_ON,
            goals.QUARANTINE,
            goals.LATE,
            goals.READ_SHORT,
            goals.READ_OVERDUE,
            goals.COPY_SHORT,
            goals.PEER_FAILS,
            goals.PEER_LEFT_EARLY,
        ),
    )


def hurry(*, deep: bool) -> Situation:
    """One read at a time, given up when all else is here (deep: at its deadline)."""
    policy = PrefetchPolicy.DEADLINE if deep else PrefetchPolicy.BEST_EFFORT
    return Situation(
        name="hurry",
        lives=(
            Life(rid="A", prompt=SHORT, story="pages=1", is_first=True, may_abort=deep),
            Life(rid="C", prompt=OTHER, story="pages=1", is_first=True),
        ),
        policy=Policy(
            n_device_pages=4,
            n_host_pages=2,
            write=WritePolicy.NONE,
            persist=Switch.OFF,
            prefetch=policy,
        ),
        limits=Limits(prefetch=policy, prefetches_in_flight_max=1, restores_in_flight_max=1),
        climate=Climate(
            has_silence=True, has_failures=deep, has_pieces=False, has_prompt_peer=True
        ),
        preamble=(
            "world page=2 device=4 host=2\nconfig write=none persist=off "
            f"prefetch={policy.value} prefetches_in_flight_max=1 restores_in_flight_max=1"
        ),
        putting="\nput A[0:1] in storage\nput C[0:1] in storage",
        puts=(
            Put(prompt=SHORT, start=0, stop=1, place=Placed.STORAGE),
            Put(prompt=OTHER, start=0, stop=1, place=Placed.STORAGE),
        ),
        n_faults=2 if deep else 1,
        goals=(goals.READY, goals.READ_ON, goals.READ_OVERDUE),
    )


@define(eq=False)
class Calm(Situation):
    """A situation in which who is admitted must get all that is there for it."""

    _uses: Callable[[int, tuple[int, ...], int], bool] = field(init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self._uses = memo(self._uses_all)

    def claims(self) -> Sequence[Claim[Now]]:
        if not self._claims:
            super().claims()
            self._claims.append(
                AlwaysStep(
                    "what is cached is used",
                    lambda before, _move, after: (
                        before.agreed == after.agreed
                        or self._uses(before.agreed, before.ranks, after.agreed)
                    ),
                )
            )
        return self._claims

    def _uses_all(self, before: int, ranks: tuple[int, ...], after: int) -> bool:
        """Of who is admitted. Nothing leaves a tier here while others come."""
        was, now = self.stage.agreed[before], self.stage.agreed[after]
        waited = {r.rid for r in was.requests.values() if isinstance(r.phase, Asking | Waiting)}
        stored = [self.stage.ranks[rank].stored for rank in ranks]
        for request in now.requests.values():
            if request.rid in waited and isinstance(request.phase, Filling):
                tags = [tag_of(request.prompt, at) for at in range(request.prompt.n_pages_full)]
                bounds = request.phase.plan.bounds
                n_device, n_host = _n_cached(was, tags)
                on_all = [all(tag in one for one in stored) for tag in tags]
                n_stored = _n_from(n_host, on_all)
                if (bounds.device, bounds.host, bounds.storage) != (n_device, n_host, n_stored):
                    return False
        return True


def _n_cached(agreed: Agreed, tags: Sequence[Tag]) -> tuple[int, int]:
    """How many of the first pages are on the device; and on from there on the host."""
    segments = {page.tag: page.segment for page in pages_of(agreed)}
    placed = [segments.get(tag) for tag in tags]
    on_device = [one is not None and one.device is not None for one in placed]
    on_host = [one is not None and one.host is not None for one in placed]
    n_device = _n_from(0, on_device)
    return n_device, _n_from(n_device, on_host)


def _n_from(start: int, here: Sequence[bool]) -> int:
    """Where the run of pages ends that begins with page `start`."""
    while start < len(here) and here[start]:
        start += 1
    return start


def calm(*, deep: bool) -> Calm:
    """No fault at all: every request ends well, and the second one uses what the first left."""
    return Calm(
        name="calm",
        n_together=2,
        lives=(
            Life(rid="A", prompt=A, story="pages=4", n_output_pages=1, n_growths=1),
            Life(rid="B", prompt=B, story="from=A[0:2] pages=2 tokens=5", after="A"),
        ),
        policy=Policy(n_device_pages=5, n_host_pages=5),
        limits=Limits(),
        climate=Climate(is_calm=True, has_failures=False, has_pieces=deep),
        preamble="world page=2 device=5 host=5",
        putting=_PUT_LINES,
        puts=_PUTS,
        n_ranks=2 if deep else 1,
        goals=(goals.READY,),
    )
