"""Two tenants with equal tokens: their pages never meet, in no tier and under no key."""

from collections.abc import Sequence
from typing import Final

from attrs import define

from kvlift.core.agreed import Agreed
from kvlift.core.keys import KEY_BYTES, Namespace, page_keys
from kvlift.core.local import Limits
from kvlift.core.phase import Filling
from kvlift.core.policy import Policy, WritePolicy
from kvlift.core.prompt import Prompt
from kvlift.models.claim import AlwaysOf, Claim, SometimesOf
from kvlift.models.worlds import goals
from kvlift.models.worlds.ghost import Rank
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.opening import Placed, Put
from kvlift.models.worlds.situation import Goal, Situation
from kvlift.models.worlds.stage import Now
from kvlift.models.worlds.weather import Climate

BLUE: Final = {"tenant": "ab", "salt": "c"}
RED: Final = {"tenant": "a", "salt": "bc"}
"""One after the other, tenant and salt are the same letters."""

PAGE_TOKENS: Final = 2

A = prompt_of(1, 1, 2, 2, 3, page_tokens=PAGE_TOKENS, **BLUE)
B = prompt_of(1, 1, 2, 2, 3, page_tokens=PAGE_TOKENS, **RED)


@define(eq=False)
class Tenants(Situation):
    """A situation that looks at the keys under which pages are stored."""

    def claims(self) -> Sequence[Claim[Now]]:
        if not self._claims:
            super().claims()
            agreed, ranks = self.stage.agreed, self.stage.ranks
            self._claims += [
                AlwaysOf("two pages never have one key", lambda now: now.ranks,
                         lambda rank: _has_a_key_each(ranks[rank])),
                AlwaysOf("every page is one tenant's", lambda now: (now.agreed,),
                         lambda number: _is_somebodys(agreed[number])),
                SometimesOf("both tenants have stored pages", lambda now: now.ranks,
                            lambda rank: _n_tenants(ranks[rank]) > 1),
            ]  # fmt: skip
        return self._claims


def _key(tag: bytes) -> bytes:
    """The key of the last page of a tag, from the chain that stores use."""
    *_, last = page_keys(tag[:KEY_BYTES], tag[KEY_BYTES:], PAGE_TOKENS)
    return last


def _has_a_key_each(rank: Rank) -> bool:
    return len({_key(tag) for tag in rank.stored}) == len(rank.stored)


def _n_tenants(rank: Rank) -> int:
    return len({tag[:KEY_BYTES] for tag in rank.stored})


def _is_somebodys(agreed: Agreed) -> bool:
    """What is neither tenant's namespace, or only a part of one, is not taken for a namespace."""
    known = {Namespace(page_tokens=PAGE_TOKENS, **one).digest() for one in (BLUE, RED)}
    met = {segment.namespace for segment in agreed.index.segments.values()}
    return met <= known and not any(_passes(one[:-1]) for one in met)


def _passes(namespace: bytes) -> bool:
    try:
        Prompt(namespace, b"", PAGE_TOKENS)
    except ValueError:
        return False
    return True


def tenants(*, deep: bool) -> Tenants:
    """Equal tokens, at once: no flight is shared, nothing stored for one is read for the other."""
    return Tenants(
        name="tenants",
        lives=(
            Life(rid="A", prompt=A, story="pages=2 tokens=5 tenant=ab salt=c"),
            Life(rid="B", prompt=B, story="like=A tenant=a salt=bc", may_abort=True),
        ),
        policy=Policy(n_device_pages=6, n_host_pages=2, write=WritePolicy.NONE),
        limits=Limits(),
        climate=Climate(has_pieces=False, has_failures=deep, has_prompt_peer=True),
        preamble="world page=2 device=6 host=2\nconfig write=none",
        putting="\nput A[0:1] in storage\nput B[0:1] in storage",
        puts=(
            Put(prompt=A, start=0, stop=1, place=Placed.STORAGE),
            Put(prompt=B, start=0, stop=1, place=Placed.STORAGE),
        ),
        n_faults=1,
        goals=(
            goals.READY,
            Goal(
                name="two tenants with equal tokens are filled at once",
                is_reached=lambda a: sum(
                    isinstance(r.phase, Filling) for r in a.requests.values()
                ) > 1,
            ),
        ),
    )  # fmt: skip
