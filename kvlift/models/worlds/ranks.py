"""Several ranks, one ballot: everything lands, fails and runs late on each by itself."""

from attrs import evolve

from kvlift.core.local import Limits
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.models.worlds import goals
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.opening import Placed, Put
from kvlift.models.worlds.situation import Situation
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2)
A_DEEP = prompt_of(1, 1, 2, 2, 3)


def ranks(*, deep: bool) -> Situation:
    """Two ranks: landings in any order, failures and clocks of one rank, storage that differs."""
    prompt = A_DEEP if deep else A
    n_host = 1 if deep else 0
    n_pages = n_host + 1
    here = Put(prompt=prompt, start=n_host, stop=n_pages, place=Placed.STORAGE)
    return Situation(
        name="ranks",
        n_together=2,
        lives=(
            Life(
                rid="A",
                prompt=prompt,
                story=f"pages={n_pages} tokens={prompt.n_tokens}",
                may_abort=True,
            ),
        ),
        policy=Policy(n_device_pages=3, n_host_pages=2, write=WritePolicy.NONE, persist=Switch.OFF),
        limits=Limits(),
        climate=Climate(has_silence=True, has_pieces=False, has_prompt_peer=True),
        preamble="world ranks=2 page=2 device=3 host=2\nconfig write=none persist=off",
        putting=f"\nput A[{n_host}:{n_pages}] in storage",
        puts=(Put(prompt=prompt, start=0, stop=n_host, place=Placed.HOST),) if deep else (),
        openings=((here,), (evolve(here, rank=0),)),
        n_ranks=2,
        n_faults=2 if deep else 1,
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


def three(*, deep: bool) -> Situation:
    """Three ranks: no two need fail alike, and one that is late is late alone."""
    here = Put(prompt=A_DEEP, start=0, stop=2, place=Placed.STORAGE)
    return Situation(
        name="three",
        n_together=3,
        lives=(Life(rid="A", prompt=A_DEEP, story="pages=2 tokens=5", may_abort=True),),
        policy=Policy(n_device_pages=3, n_host_pages=2, write=WritePolicy.NONE, persist=Switch.OFF),
        limits=Limits(),
        climate=Climate(has_silence=deep, has_pieces=False, has_prompt_peer=True),
        preamble="world ranks=3 page=2 device=3 host=2\nconfig write=none persist=off",
        putting="\nput A in storage",
        openings=((here,), (evolve(here, rank=0), evolve(here, rank=1, stop=1))),
        n_ranks=3,
        n_faults=2,
        goals=(
            goals.READY,
            goals.DRAINS,
            goals.WIDENS,
            goals.APART,
            goals.READ_SHORT,
            goals.COPY_SHORT,
        ),
    )
