"""A hole in storage: what lies behind it is still there, or is being written at this moment."""

from kvlift.core.agreed import Agreed
from kvlift.core.index import ROOT, Segment
from kvlift.core.local import Limits
from kvlift.core.policy import Policy, WritePolicy
from kvlift.models.worlds import goals
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.opening import Placed, Put
from kvlift.models.worlds.situation import Goal, Situation
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2, 2)


def _behind_a_hole(agreed: Agreed) -> list[Segment]:
    segments = agreed.index.segments
    return [
        segment
        for segment in segments.values()
        if segment.parent != ROOT and not segments[segment.parent].stored
    ]


STORED_BEHIND = Goal(
    name="a stored page lies behind one that storage has lost",
    is_reached=lambda agreed: any(segment.stored for segment in _behind_a_hole(agreed)),
)
WRITTEN_BEHIND = Goal(
    name="a page is being written behind one that storage has lost",
    is_reached=lambda agreed: any(segment.persisting for segment in _behind_a_hole(agreed)),
)


def _second(place: Placed) -> Put:
    return Put(prompt=A, start=1, stop=2, place=place)


def hole(*, deep: bool) -> Situation:
    """Storage has lost a page; the next one is there, or being written. B has no prefill node."""
    return Situation(
        name="hole",
        lives=(
            Life(rid="A", prompt=A, story="pages=2", is_first=True, may_abort=deep),
            Life(
                rid="B",
                prompt=A,
                story="from=A[0:2] pages=2",
                after="A",
                peer="",
                may_abort=True,
            ),
        ),
        policy=Policy(n_device_pages=4, n_host_pages=1, write=WritePolicy.NONE),
        limits=Limits(),
        climate=Climate(has_pieces=False, has_prompt_peer=True),
        preamble="world page=2 device=4 host=1\nconfig write=none",
        putting="\nput A[0:1] in storage",
        puts=(Put(prompt=A, start=0, stop=1, place=Placed.STORAGE),),
        openings=((), (_second(Placed.HOST), _second(Placed.STORAGE))),
        n_faults=3,
        others=("flush device", "flush host"),
        goals=(goals.READY, STORED_BEHIND, WRITTEN_BEHIND),
    )
