"""Few pages and many requests: who waits, who goes first, and that nobody waits for ever."""

from kvlift.core.local import Limits
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.models.worlds import goals
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.situation import Situation
from kvlift.models.worlds.weather import Climate


def budget(*, deep: bool) -> Situation:
    """Three requests, four device pages: no deadlock, and who is overtaken gets a turn."""
    return Situation(
        name="budget",
        lives=(
            Life(rid="A", prompt=prompt_of(1, 1, 2, 2), story="pages=2", may_abort=True),
            Life(rid="B", prompt=prompt_of(3, 3, 4, 4, 5), story="pages=2 tokens=5"),
            Life(rid="C", prompt=prompt_of(6, 6), story="pages=1", n_growths=1),
        ),
        policy=Policy(
            n_device_pages=4,
            n_host_pages=1,
            write=WritePolicy.THROUGH if deep else WritePolicy.NONE,
            persist=Switch.OFF,
            bypass_max=1,
            decode_reserve_pages=1 if deep else 0,
        ),
        limits=Limits(),
        climate=Climate(has_failures=False, has_pieces=False, has_silence=deep),
        preamble="world page=2 device=4 host=1\n"
        f"config write={'through' if deep else 'none'} persist=off bypass_max=1 "
        f"decode_reserve_pages={int(deep)}",
        n_faults=1,
        storage=Switch.OFF,
        goals=(goals.READY, goals.WAITS, goals.BYPASSED),
    )
