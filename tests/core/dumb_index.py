"""A twin of the prefix index that is too simple to be wrong: a record for every page of a path."""

from attrs import define, field

from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier

Place = tuple[bytes, bytes]
"""A page: its namespace, and all tokens up to its end."""


@define
class DumbTier:
    """`pages`: the handle of each resident page. `pins`, `stale`: by page."""

    pages: dict[Place, int] = field(factory=dict)
    pins: dict[Place, int] = field(factory=dict)
    stale: set[Place] = field(factory=set)

    def n_idle(self) -> int:
        return sum(1 for place in self.pages if not self.pins.get(place))


@define
class DumbIndex:
    tiers: dict[Tier, DumbTier] = field(factory=lambda: {t: DumbTier() for t in Tier})

    @staticmethod
    def place(prompt: Prompt, page: int) -> Place:
        return prompt.namespace, prompt.tokens[: (page + 1) * prompt.page_bytes()]

    def n_known(self, prompt: Prompt) -> int:
        """Leading pages that have a place because they, or pages behind them, are of use."""
        known: set[Place] = set()
        for tier in self.tiers.values():
            known |= set(tier.pages) | {place for place, n in tier.pins.items() if n}
        n_pages = 0
        for page in range(prompt.n_pages_full):
            namespace, tokens = self.place(prompt, page)
            if not any(n == namespace and t.startswith(tokens) for n, t in known):
                break
            n_pages += 1
        return n_pages

    def is_found(self, tier: Tier, prompt: Prompt, page: int) -> bool:
        one, place = self.tiers[tier], self.place(prompt, page)
        return place in one.pages and place not in one.stale

    def hit(self, prompt: Prompt) -> tuple[int, int]:
        device = 0
        while device < prompt.n_pages_full and self.is_found(Tier.DEVICE, prompt, device):
            device += 1
        host = device
        while host < prompt.n_pages_full and self.is_found(Tier.HOST, prompt, host):
            host += 1
        return device, host

    def fill(self, tier: Tier, prompt: Prompt, start: int, handles: list[int]) -> None:
        for page, handle in enumerate(handles, start):
            self.tiers[tier].pages[self.place(prompt, page)] = handle

    def pin(self, tier: Tier, prompt: Prompt, start: int, stop: int) -> None:
        pins = self.tiers[tier].pins
        for page in range(start, stop):
            place = self.place(prompt, page)
            pins[place] = pins.get(place, 0) + 1

    def unpin(self, tier: Tier, prompt: Prompt, start: int, stop: int) -> set[int]:
        """The handles that are free now."""
        one, freed = self.tiers[tier], set()
        for page in range(start, stop):
            place = self.place(prompt, page)
            one.pins[place] -= 1
            if one.pins[place] == 0 and place in one.stale:
                one.stale.discard(place)
                freed.add(one.pages.pop(place))
        return freed

    def flush(self, tier: Tier) -> set[int]:
        one, freed = self.tiers[tier], set()
        for place in list(one.pages):
            if one.pins.get(place):
                one.stale.add(place)
            else:
                freed.add(one.pages.pop(place))
        return freed

    def forget(self, tier: Tier, handles: set[int]) -> None:
        one = self.tiers[tier]
        for place in [place for place, handle in one.pages.items() if handle in handles]:
            assert not one.pins.get(place), "a pinned page was evicted"
            del one.pages[place]

    def is_leaf_first(self, tier: Tier, gone: set[int]) -> bool:
        """No page that went has an idle page behind it that stayed, on an unbroken idle path."""
        one = self.tiers[tier]
        for (namespace, tokens), handle in one.pages.items():
            if handle not in gone:
                continue
            size = min(len(t) for _n, t in one.pages)
            for (other, longer), stayed in one.pages.items():
                is_child = other == namespace and len(longer) == len(tokens) + size
                is_idle = not one.pins.get((other, longer))
                if is_child and longer.startswith(tokens) and stayed not in gone and is_idle:
                    return False
        return True
