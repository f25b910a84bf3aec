"""The way down: finished pages go to the host and to storage while others need their room."""

from collections.abc import Sequence

from kvlift.core.local import Limits
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.models.claim import Claim
from kvlift.models.worlds import goals
from kvlift.models.worlds.adopted import HAS_BALLOT
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.opening import Placed, Put
from kvlift.models.worlds.situation import Goal, Situation
from kvlift.models.worlds.stage import Now
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2, 2)
B = prompt_of(1, 1, 3, 3)
C = prompt_of(1, 1, 5, 5, 6)
D = prompt_of(8, 8, 9, 9)
E = prompt_of(4, 4, 5)

F = prompt_of(7, 7)

GROWS = Goal(name="a growth waits for room", is_reached=lambda a: bool(a.growths))

LEFT_BEHIND = Goal(
    name="a page goes down before one that was used earlier",
    is_reached=lambda a: any(
        one.mirroring and other.is_dirty() and not other.mirroring and other.used < one.used
        for one in a.index.segments.values()
        for other in a.index.segments.values()
    ),
)


def mirror(*, deep: bool) -> Situation:
    """Write-through and persist against eviction, a flush, a failure and a storage that goes."""
    return Situation(
        name="mirror",
        n_together=2,
        lives=(
            Life(rid="A", prompt=A, story="pages=2"),
            Life(rid="B", prompt=B, story="from=A[0:1] pages=2", after="A"),
        ),
        policy=Policy(n_device_pages=3, n_host_pages=2),
        limits=Limits(mirrors_in_flight_max=1, persists_in_flight_max=1),
        climate=Climate(has_pieces=deep),
        preamble="world page=2 device=3 host=2\n"
        "config mirrors_in_flight_max=1 persists_in_flight_max=1",
        n_faults=2 if deep else 1,
        others=("flush device", "flush host", "flush all", "detach storage", "attach storage"),
        goals=(goals.READY, goals.MIRROR_DURING_FLUSH),
    )


def down(*, deep: bool) -> Situation:
    """The way down on two ranks: a copy, a write or a partial page that one of them loses."""
    return Situation(
        name="down",
        n_together=2,
        lives=(Life(rid="E", prompt=E, story="pages=1 tokens=3", n_retractions=1),),
        policy=Policy(n_device_pages=2, n_host_pages=2),
        limits=Limits(),
        climate=Climate(has_pieces=False, has_prompt_peer=True),
        preamble="world ranks=2 page=2 device=2 host=2",
        n_ranks=2,
        n_faults=2,
        others=("flush device",) if deep else (),
        goals=(goals.READY, goals.APART, goals.PARTIAL_PAGE),
    )


class Growing(Situation):
    """A growth opens tickets between two ticks: their ballot is not out yet."""

    def claims(self) -> Sequence[Claim[Now]]:
        if not self._claims:
            super().claims()
            self._claims[:] = [claim for claim in self._claims if claim.name != HAS_BALLOT]
        return self._claims


def grows(*, deep: bool) -> Growing:
    """A running request needs the room of pages that are on their way down: it waits for them."""
    return Growing(
        name="grows",
        lives=(
            Life(rid="A", prompt=A, story="pages=2"),
            Life(rid="E", prompt=E, story="pages=1 tokens=3", n_growths=2, is_first=True),
        ),
        policy=Policy(
            n_device_pages=4,
            n_host_pages=2 if deep else 1,
            write=WritePolicy.BACK,
            persist=Switch.OFF,
        ),
        limits=Limits(),
        climate=Climate(has_pieces=False, has_prompt_peer=True),
        preamble="world page=2 device=4 host=1\nconfig write=back persist=off",
        openings=(
            (),
            (
                Put(prompt=A, start=0, stop=1, place=Placed.HOST),
                Put(prompt=A, start=1, stop=2, place=Placed.DEVICE),
            ),
        ),
        n_faults=1,
        storage=Switch.OFF,
        goals=(goals.READY, GROWS),
    )


def halfway(*, deep: bool) -> Situation:
    """The page that should go down first has no room but that of the pages in front of it."""
    return Situation(
        name="halfway",
        lives=(
            Life(rid="B", prompt=D, story="pages=2", may_abort=deep),
            Life(rid="F", prompt=F, story="pages=1"),
        ),
        policy=Policy(
            n_device_pages=2,
            n_host_pages=1,
            write=WritePolicy.BACK,
            persist=Switch.OFF,
            write_back_low_water_pages=1,
        ),
        limits=Limits(),
        climate=Climate(has_pieces=False, has_prompt_peer=not deep),
        preamble="world page=2 device=2 host=1\n"
        "config write=back persist=off write_back_low_water_pages=1\nprompt A pages=2",
        putting="\nput A[0:1] in host\nput A[1:2] in device\nput F in device",
        puts=(
            Put(prompt=A, start=0, stop=1, place=Placed.HOST),
            Put(prompt=A, start=1, stop=2, place=Placed.DEVICE),
            Put(prompt=F, start=0, stop=1, place=Placed.DEVICE),
        ),
        n_faults=1,
        storage=Switch.OFF,
        goals=(goals.READY, goals.WAITS, LEFT_BEHIND),
    )


def back(*, deep: bool) -> Situation:
    """Write-back on a tight device: pages go down, or fail to, while a request waits for room.

    That a dirty page is no room is not a claim of this world: where one is given away too early the
    cache is smaller, and no page is wrong. Stories and `tests/core` hold it."""
    return Situation(
        name="back",
        lives=(
            Life(rid="A", prompt=A, story="pages=2"),
            Life(rid="B", prompt=C, story="from=A[0:1] pages=2 tokens=5", n_growths=1),
            Life(rid="D", prompt=D, story="pages=2", after="B"),
        ),
        policy=Policy(
            n_device_pages=4,
            n_host_pages=2 if deep else 1,
            write=WritePolicy.BACK,
            persist=Switch.OFF,
            write_back_low_water_pages=1,
        ),
        limits=Limits(),
        climate=Climate(has_pieces=False),
        preamble=f"world page=2 device=4 host={2 if deep else 1}\n"
        "config write=back persist=off write_back_low_water_pages=1",
        n_faults=1,
        storage=Switch.OFF,
        others=("flush host",),
        goals=(goals.READY, goals.WAITS),
    )
