"""Decoded pages join the index: the same pages are brought by somebody else at that moment."""

from kvlift.core.local import Limits
from kvlift.core.phase import Filling
from kvlift.core.policy import Policy, Switch
from kvlift.models.worlds import goals
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.opening import Placed, Put
from kvlift.models.worlds.situation import Goal, Situation
from kvlift.models.worlds.weather import TOKEN, Climate

A = prompt_of(TOKEN)
B = prompt_of(TOKEN, TOKEN, 4, 4, 5)
TWICE = Goal(
    name="a page that is being read is there already",
    is_reached=lambda a: (
        any(
            isinstance(r.phase, Filling) and any(part.read is not None for part in r.phase.parts)
            for r in a.requests.values()
        )
        and any(s.host is not None for s in a.index.segments.values())
    ),
)


def decode(*, deep: bool) -> Situation:
    """A's answer begins as B's prompt does, and gets to the host before B's read has ended."""
    return Situation(
        name="decode",
        lives=(
            Life(rid="A", prompt=A, story="pages=0 tokens=1", n_output_pages=2, n_growths=2),
            Life(rid="B", prompt=B, story="pages=2 tokens=5"),
        ),
        policy=Policy(n_device_pages=6, n_host_pages=4, persist=Switch.ON if deep else Switch.OFF),
        limits=Limits(),
        climate=Climate(has_pieces=False, has_failures=deep, has_prompt_peer=True),
        preamble="world page=2 device=6 host=4\nconfig persist=off",
        openings=((), (Put(prompt=B, start=0, stop=1, place=Placed.STORAGE),)),
        n_faults=1 if deep else 0,
        goals=(goals.READY, TWICE),
    )
