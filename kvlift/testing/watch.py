"""What must hold after every tick, whatever a story does. Shares no code with the core.

It looks at the simulated ports (what is in flight), at the physical page tables (who has a page)
and at memory (what a page holds). A broken claim is a sentence; a sound tick gives none.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import define, field, frozen

from kvlift.core.ids import Ticket
from kvlift.core.tier import Tier
from kvlift.testing.sim_memory import Content, PageValue, SimMemory
from kvlift.testing.sim_rank import SimRank
from kvlift.testing.story_host import HostRequest

PARTS = ("free", "cached", "owned", "reserved", "draining")


@frozen(kw_only=True)
class TierFacts:
    """One tier of one rank: counts by part, and the physical page of every page that is in use.

    `n_aside` of the owned pages have no physical page: somebody outside has them. `cached` says
    what the pages of the index must hold, by physical page.
    """

    capacity: int
    counts: Mapping[str, int]
    n_aside: int = 0
    free_pages: frozenset[int]
    used_pages: Mapping[int, int]
    cached: Mapping[int, PageValue] = field(factory=dict)


@frozen(kw_only=True)
class RankFacts:
    """What the driver of one rank says of itself. `open_tickets` have not been answered."""

    device: TierFacts
    host: TierFacts
    open_tickets: frozenset[Ticket]


@define
class Watch:
    """Remembers what it needs from tick to tick. `n_sent_by_rank`: reductions so far.

    `n_restored_by_rank`: how many pages of each open restore have been started."""

    n_sent_by_rank: dict[int, int] = field(factory=dict)
    closed_by_rank: dict[int, set[Ticket]] = field(factory=lambda: defaultdict(set))
    open_by_rank: dict[int, frozenset[Ticket]] = field(factory=dict)
    started_by_rank: dict[int, set[Ticket]] = field(factory=lambda: defaultdict(set))
    n_restored_by_rank: dict[int, dict[Ticket, int]] = field(factory=lambda: defaultdict(dict))

    def broken(
        self,
        ranks: Sequence[SimRank],
        facts: Sequence[RankFacts],
        requests: Iterable[HostRequest],
    ) -> list[str]:
        """Every claim that does not hold now."""
        held = [one for one in requests if any(one.tables)]
        found = list(self._reductions(ranks))
        for number, (rank, said) in enumerate(zip(ranks, facts, strict=True)):
            here = [
                *_conservation(Tier.DEVICE, said.device),
                *_conservation(Tier.HOST, said.host),
                *_owners(Tier.DEVICE, said.device),
                *_owners(Tier.HOST, said.host),
                *_flights(rank, said),
                *_tables(number, said, held),
                *_contents(number, rank.memory, held),
                *_cached(Tier.DEVICE, said.device, rank.memory.device),
                *_cached(Tier.HOST, said.host, rank.memory.host),
                *self._tickets(number, rank, said),
            ]
            found += [f"rank {number}: {claim}" for claim in here]
        return found

    def forget(self) -> None:
        """The decode worker has restarted: tickets and reductions begin anew."""
        self.n_sent_by_rank.clear()
        self.closed_by_rank.clear()
        self.open_by_rank.clear()
        self.started_by_rank.clear()
        self.n_restored_by_rank.clear()

    def _reductions(self, ranks: Sequence[SimRank]) -> Iterator[str]:
        sent = [rank.ranks.n_sent - self.n_sent_by_rank.get(rank.ranks.rank, 0) for rank in ranks]
        for rank in ranks:
            self.n_sent_by_rank[rank.ranks.rank] = rank.ranks.n_sent
        if max(sent) > 1:
            yield f"a rank takes part in {max(sent)} reductions in one tick"
        if len(set(sent)) > 1:
            yield f"the ranks take part in {sent} reductions in one tick"

    def _tickets(self, number: int, rank: SimRank, said: RankFacts) -> Iterator[str]:
        closed = self.closed_by_rank[number]
        again = said.open_tickets & closed
        if again:
            yield f"tickets {sorted(again)} are open again after their end"
        closed |= self.open_by_rank.get(number, frozenset()) - said.open_tickets
        self.open_by_rank[number] = said.open_tickets
        for calls in (rank.store.calls, rank.copies.calls, rank.peers.calls):
            twice = self.started_by_rank[number] & set(calls.tickets)
            if twice or len(set(calls.tickets)) < len(calls.tickets):
                yield f"tickets {sorted(twice)} of {calls.tickets} are used for a second effect"
            self.started_by_rank[number] |= set(calls.tickets)
        yield from self._pieces(number, rank, said)

    def _pieces(self, number: int, rank: SimRank, said: RankFacts) -> Iterator[str]:
        """A restore comes in order, one piece at a time, and no page of it twice."""
        known = self.n_restored_by_rank[number]
        for ticket, start, n_pages in rank.copies.calls.pieces:
            if start != known.get(ticket, 0):
                n_known = known.get(ticket, 0)
                yield f"ticket {ticket} restores from page {start} on behind {n_known} pages"
            known[ticket] = start + n_pages
        for ticket in [one for one in known if one not in said.open_tickets]:
            del known[ticket]
        running = Counter(copy.ticket for copy in rank.copies.running())
        for ticket in [one for one, n_copies in running.items() if n_copies > 1]:
            yield f"ticket {ticket} has {running[ticket]} copies at a time"


def _conservation(tier: Tier, facts: TierFacts) -> Iterator[str]:
    total = sum(facts.counts.get(part, 0) for part in PARTS)
    if total != facts.capacity:
        counts = " ".join(f"{part}={facts.counts.get(part, 0)}" for part in PARTS)
        yield f"{tier.value} pages are not conserved: {counts} of {facts.capacity}"
    n_used = sum(facts.counts.get(part, 0) for part in PARTS[1:]) - facts.n_aside
    if n_used != len(facts.used_pages):
        yield f"{tier.value} counts {n_used} pages in use, {len(facts.used_pages)} have a place"
    if len(facts.used_pages) + len(facts.free_pages) != facts.capacity:
        n_known = len(facts.used_pages) + len(facts.free_pages)
        yield f"{tier.value} knows {n_known} physical pages of {facts.capacity}"
    if any(count < 0 for count in facts.counts.values()):
        yield f"{tier.value} has a negative count: {dict(facts.counts)}"


def _owners(tier: Tier, facts: TierFacts) -> Iterator[str]:
    handle_by_page: dict[int, int] = {}
    for handle, page in facts.used_pages.items():
        if page in handle_by_page:
            yield f"{tier.value} page {page} is page {handle_by_page[page]} and page {handle}"
        if page in facts.free_pages:
            yield f"{tier.value} page {page} is free and in use as page {handle}"
        handle_by_page[page] = handle


def _flights(rank: SimRank, said: RankFacts) -> Iterator[str]:
    """No page in flight is free, and nothing else touches a page that is being written."""
    free = {Tier.DEVICE: said.device.free_pages, Tier.HOST: said.host.free_pages}
    touched: dict[tuple[Tier, int], list[tuple[str, Ticket]]] = defaultdict(list)
    for access in rank.accesses():
        for page in access.pages:
            if page in free[access.tier]:
                what = f"ticket {access.ticket} {access.kind} it"
                yield f"{access.tier.value} page {page} is free while {what}"
            touched[access.tier, page].append((access.kind, access.ticket))
    for (tier, page), users in touched.items():
        if len(users) > 1 and any(kind == "writes" for kind, _ticket in users):
            yield f"{tier.value} page {page} is written while others use it: {users}"


def _tables(number: int, said: RankFacts, held: Iterable[HostRequest]) -> Iterator[str]:
    """A device page of two requests holds the same tokens at the same place."""
    first: dict[int, tuple[str, object]] = {}
    for request in held:
        for position, page in enumerate(request.tables[number]):
            here = request.prompt.value(position)
            name, other = first.setdefault(page, (request.prompt.name, here))
            if other != here:
                yield f"device page {page} belongs to {name} and to {request.prompt.name}"
            if page in said.device.free_pages:
                yield f"device page {page} of {request.prompt.name} is free"


def _contents(number: int, memory: SimMemory, held: Iterable[HostRequest]) -> Iterator[str]:
    for request in held:
        wrong = request.wrong_pages(number, memory) if request.tables[number] else []
        if wrong:
            yield f"pages {wrong} of {request.prompt.name} do not hold what their tokens say"


def _cached(tier: Tier, facts: TierFacts, pool: Sequence[Content]) -> Iterator[str]:
    """What the index offers to the next request is really there."""
    wrong = [page for page, value in facts.cached.items() if pool[page] != value]
    if wrong:
        yield f"cached {tier.value} pages {wrong} do not hold what their tokens say"
