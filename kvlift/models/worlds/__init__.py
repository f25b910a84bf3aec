"""The worlds that `kvlift check` explores, by name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

from kvlift.models.claim import World
from kvlift.models.worlds.budget import budget
from kvlift.models.worlds.claims import CALM_SHARE
from kvlift.models.worlds.late import late
from kvlift.models.worlds.mirror import back, mirror
from kvlift.models.worlds.peer import peer, shortfall, widen
from kvlift.models.worlds.ranks import ranks
from kvlift.models.worlds.restore import calm, hurry, restore
from kvlift.models.worlds.retract import retract
from kvlift.models.worlds.share import orphan, share
from kvlift.models.worlds.stow import stow

__all__ = ["CALM_SHARE", "WORLDS", "WorldFactory"]


class WorldFactory(Protocol):
    """Builds a world. `deep`: the large one, for a check that may take many minutes.

    The states of worlds have nothing in common, so they are `Any` here and typed inside.
    """

    def __call__(self, *, deep: bool) -> World[Any]: ...


WORLDS: Final[Mapping[str, WorldFactory]] = MappingProxyType(
    {
        "restore": restore,
        "ranks": ranks,
        "share": share,
        "orphan": orphan,
        "peer": peer,
        "widen": widen,
        "shortfall": shortfall,
        "budget": budget,
        "mirror": mirror,
        "back": back,
        "retract": retract,
        "hurry": hurry,
        "calm": calm,
        "stow": stow,
        "late": late,
    }
)
