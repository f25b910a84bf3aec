"""Several ranks, one ballot: everything lands, fails and runs late on each by itself."""

from kvlift.core.local import Limits
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.models.worlds import goals
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.situation import Situation
from kvlift.models.worlds.stage import Placed, Put
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2, 2, 3)


def ranks(*, deep: bool) -> Situation:
    """Two ranks: landings in any order, failures and clocks of one rank, storage that differs."""
    return Situation(
        name="ranks",
        lives=(Life(rid="A", prompt=A, story="pages=2 tokens=5", may_abort=True),),
        policy=Policy(n_device_pages=3, n_host_pages=2, write=WritePolicy.NONE, persist=Switch.OFF),
        limits=Limits(),
        climate=Climate(has_silence=True, has_pieces=False, has_prompt_peer=not deep),
        preamble="world ranks=2 page=2 device=3 host=2\nconfig write=none persist=off",
        putting="\nput A[0:1] in host\nput A[1:2] in storage",
        puts=(Put(prompt=A, start=0, stop=1, place=Placed.HOST),),
        openings=(
            (Put(prompt=A, start=1, stop=2, place=Placed.STORAGE),),
            (Put(prompt=A, start=1, stop=2, place=Placed.STORAGE, rank=0),),
        ),
        n_ranks=2,
        n_faults=2 if deep else 1,
        n_together=2,
        goals=(
            goals.READY,
            goals.DRAINS,
            goals.WIDENS,
            goals.APART,
            goals.OVERDUE_APART,
            goals.READ_SHORT,
            goals.COPY_SHORT,
            goals.READ_OVERDUE,
        ),
    )
