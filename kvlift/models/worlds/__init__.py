"""The worlds that `kvlift check` explores, by name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

from kvlift.models.claim import World


class WorldFactory(Protocol):
    """Builds a world. `deep`: the large one, for a check that may take many minutes.

    The states of worlds have nothing in common, so they are `Any` here and typed inside.
    """

    def __call__(self, *, deep: bool) -> World[Any]: ...


WORLDS: Final[Mapping[str, WorldFactory]] = MappingProxyType({})

CALM_SHARE: Final = "calm requests end well and use the cache"
"""The name of the `Share` that calm worlds (no fault, abort or deadline) claim: of all requests in
their last states those that ended well and took pages from the cache. A core that is safe because
it never uses the cache shows up here."""
