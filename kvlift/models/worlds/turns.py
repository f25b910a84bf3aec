"""A ballot too short for all that is open: everything gets its turn."""

from attrs import define, evolve

from kvlift.core.agreed import Agreed
from kvlift.core.canonical import Naming, agreed_key, renamed_agreed
from kvlift.core.landed import PeerCause
from kvlift.core.local import Limits
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.models.worlds import goals
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.situation import Goal, Situation
from kvlift.models.worlds.stage import Stage
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2)
B = prompt_of(3, 3)

N_TURNS = 12
"""The ticks that are told apart: of 1, 2, 3 or 4 open tickets each has its turn within as many."""


@define(eq=False)
class Counting(Stage):
    """A stage that remembers whose turn it is: the tick, as far as the ballots depend on it."""

    def number_of_agreed(self, agreed: Agreed) -> int:
        return self.agreed.number((agreed_key(agreed), agreed.tick), lambda: agreed)

    def renamed_agreed(self, after: Agreed, naming: Naming) -> Agreed:
        turn = after.tick % N_TURNS if len(after.tickets) > self.policy.ballot_slots else 0
        return evolve(renamed_agreed(after, naming, self.policy), tick=turn)


@define(eq=False)
class Turns(Situation):
    """A situation on such a stage."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.stage = Counting(self.policy, self.limits, self.climate, self.n_ranks)


def turns(*, deep: bool) -> Turns:
    """Two requests, one place in the ballot."""
    return Turns(
        name="turns",
        lives=(
            Life(rid="A", prompt=A, story="pages=1 tokens=3", is_first=True, may_abort=True),
            Life(rid="B", prompt=B, story="pages=1", is_first=True, may_abort=deep),
        ),
        policy=Policy(
            n_device_pages=3,
            n_host_pages=0,
            write=WritePolicy.NONE,
            persist=Switch.OFF,
            ballot_slots=1,
        ),
        limits=Limits(),
        climate=Climate(
            has_pieces=False,
            has_failures=False,
            has_early_token=True,
            has_echoes=True,
            peer_failures=frozenset({PeerCause.LOST}) if deep else frozenset(),
        ),
        preamble="world page=2 device=3 host=0\nconfig write=none persist=off ballot_slots=1",
        n_faults=1,
        storage=Switch.OFF,
        goals=(
            goals.READY,
            goals.DRAINS,
            Goal(
                name="three wait for one place in the ballot",
                is_reached=lambda a: len(a.tickets) > 2,
            ),
        ),
    )
