"""The worlds that `kvlift check` explores, by name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

from kvlift.models.claim import World
from kvlift.models.worlds.adopted import adopted, beyond, lent
from kvlift.models.worlds.aside import aside
from kvlift.models.worlds.budget import budget
from kvlift.models.worlds.claims import CALM_SHARE
from kvlift.models.worlds.decode import decode
from kvlift.models.worlds.hasty import hasty
from kvlift.models.worlds.heirs import heirs, unfound
from kvlift.models.worlds.hole import hole
from kvlift.models.worlds.hosted import hosted
from kvlift.models.worlds.late import late, pair
from kvlift.models.worlds.line import behind, queue, urgent
from kvlift.models.worlds.mirror import back, down, grows, halfway, mirror
from kvlift.models.worlds.order import aged, dear, rare
from kvlift.models.worlds.peer import peer, shortfall, widen
from kvlift.models.worlds.pieces import pieces
from kvlift.models.worlds.poke import poke
from kvlift.models.worlds.price import price, reserve
from kvlift.models.worlds.ranks import ranks, three
from kvlift.models.worlds.restore import calm, hurry, restore
from kvlift.models.worlds.retract import retract
from kvlift.models.worlds.share import orphan, share
from kvlift.models.worlds.split import split
from kvlift.models.worlds.spoilt import spoilt
from kvlift.models.worlds.stow import stow, wiped
from kvlift.models.worlds.stuck import stuck
from kvlift.models.worlds.tenants import tenants
from kvlift.models.worlds.turns import turns

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
        "wiped": wiped,
        "hole": hole,
        "late": late,
        "pair": pair,
        "pieces": pieces,
        "down": down,
        "grows": grows,
        "halfway": halfway,
        "three": three,
        "heirs": heirs,
        "unfound": unfound,
        "stuck": stuck,
        "adopted": adopted,
        "lent": lent,
        "beyond": beyond,
        "hosted": hosted,
        "split": split,
        "turns": turns,
        "tenants": tenants,
        "decode": decode,
        "hasty": hasty,
        "queue": queue,
        "behind": behind,
        "urgent": urgent,
        "rare": rare,
        "aged": aged,
        "dear": dear,
        "price": price,
        "reserve": reserve,
        "aside": aside,
        "poke": poke,
        "spoilt": spoilt,
    }
)
