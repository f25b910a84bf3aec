"""What must hold after every tick, and at the end. Independent of the core: these look at memory,
at the physical page tables, at what the ports have in flight, and at what the host was told.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from attrs import define, field

from kvlift.core.counts import Counts, device_counts, host_counts
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Source, Tier
from kvlift.effects.pages import PageTable
from kvlift.runtime.driver import Driver
from kvlift.runtime.snapshot import counts_of_rank
from kvlift.runtime.tick import Tick
from kvlift.testing.sim.job import Job
from kvlift.testing.sim.world import World
from kvlift.testing.sim_memory import PageValue, page_value
from kvlift.testing.story_view import rank_view
from kvlift.testing.watch import PARTS, RankFacts, TierFacts, Watch

CACHED = (Source.DEVICE, Source.HOST, Source.STORAGE)
MANY: Final = ("", 0)
TICKS_BETWEEN_LOOKS: Final = 25
"""Looking at every cached page costs more than a tick."""


@define(eq=False)
class Checks:
    """`bringer`: who could have brought a page, so that a hit can be traced to somebody else.

    A submission is (request, how many times it was tried); MANY: more than one of them could."""

    watch: Watch = field(factory=Watch)
    bringer: dict[PageValue, tuple[str, int]] = field(factory=dict)
    n_ticks: int = 0
    _n_noted: dict[tuple[str, int], int] = field(factory=dict)

    def broken(self, world: World, ticks: Sequence[Tick], jobs: Mapping[str, Job]) -> Iterator[str]:
        """Every claim that does not hold after this tick, each with the name of its checker."""
        yield from (f"calls: {bug}" for bug in world.bugs)
        yield from agreement(world.drivers, ticks)
        facts = [facts_of(world, number) for number in range(len(world.ranks))]
        for claim in self.watch.broken(world.ranks, facts, ()):
            yield f"conservation: {claim}"
        held = [job for job in jobs.values() if job.has_pages]
        for number in range(len(world.ranks)):
            yield from bytes_and_owners(number, world, facts[number], held)
        for job in jobs.values():
            self._note(job)
        yield from self._origins(ticks, jobs)
        self.n_ticks += 1
        if self.n_ticks % TICKS_BETWEEN_LOOKS == 0:
            yield from cached_bytes(world)
            yield from stored_bytes(world)

    def know(self, prompts: Iterable[Prompt]) -> None:
        """Pages that were there before the run."""
        for prompt in prompts:
            for position in range(prompt.n_pages_full):
                self.bringer[page_value(prompt, position)] = MANY

    def _note(self, job: Job) -> None:
        """A submission may bring the pages of its prompt, and those that it decodes."""
        submission = (job.rid, job.n_tries)
        n_noted = self._n_noted.get(submission, 0)
        n_tokens = max(job.order.prompt.n_tokens, job.n_tokens_with_kv)
        n_pages = n_tokens // job.page_tokens
        if n_pages <= n_noted:
            return
        self._n_noted[submission] = n_pages
        for position in range(n_noted, n_pages):
            value = job.value(position)
            if self.bringer.setdefault(value, submission) != submission:
                self.bringer[value] = MANY

    def _origins(self, ticks: Sequence[Tick], jobs: Mapping[str, Job]) -> Iterator[str]:
        """What came from the cache is what another submission of this namespace could bring."""
        for ready in ticks[0].ready:
            job = jobs[ready.rid]
            n_cached = sum(ready.n_pages_by_source.get(source, 0) for source in CACHED)
            if job.n_ready != 1 or n_cached == 0:
                continue
            n_full = min(n_cached, job.order.prompt.n_pages_full)
            if n_full and self.bringer.get(job.value(n_full - 1)) == (job.rid, job.n_tries):
                yield f"isolation: {job.rid} was given {n_cached} pages that nobody has had"


def agreement(drivers: Sequence[Driver], ticks: Sequence[Tick]) -> Iterator[str]:
    """The ranks have decided the same and told their hosts the same."""
    digests = {driver.state.agreed.digest for driver in drivers}
    if len(digests) > 1:
        yield f"agreement: the ranks have {len(digests)} different digests"
    said = [words_of(tick) for tick in ticks]
    for number, words in enumerate(said):
        if words != said[0]:
            yield f"agreement: rank {number} says {words!r} where rank 0 says {said[0]!r}"


def words_of(tick: Tick) -> str:
    """What a tick told, without what is local to a rank."""
    parts = [
        *(
            f"{one.rid} ready {len(one.device_pages)} {one.token} {one.needs_prefill_from} "
            + ",".join(f"{source.value}={n}" for source, n in one.n_pages_by_source.items())
            for one in tick.ready
        ),
        *(f"{one.rid} {one.outcome.value}" for one in tick.ended),
        *(f"{one.rid} shrunk to {one.page}" for one in tick.shrunk),
        *(f"{one.rid} grown {len(one.device_pages)}" for one in tick.grown),
        *(f"{rid} retracted" for rid in tick.retracted),
        *(f"{one.rid} refused {one.call}" for one in tick.refused),
    ]
    return "; ".join(parts)


def facts_of(world: World, number: int) -> RankFacts:
    """What a driver says of itself: its counts, and who has which physical page."""
    driver, aside = world.drivers[number], world.asides[number]
    agreed = driver.state.agreed
    device, host = driver.page_table(Tier.DEVICE), driver.page_table(Tier.HOST)
    return RankFacts(
        device=_tier(device, device_counts(agreed), aside.get(Tier.DEVICE, 0)),
        host=_tier(host, host_counts(agreed), aside.get(Tier.HOST, 0)),
        open_tickets=frozenset(agreed.tickets),
    )


def stored_bytes(world: World) -> Iterator[str]:
    """What is in storage is what its key says, read or not: its checksum is of what was written."""
    for number, rank in enumerate(world.ranks):
        wrong = [key for key, stored in rank.store.pages.items() if stored.content != key]
        if wrong:
            yield f"bytes: rank {number}: pages {wrong[:4]} in storage hold something else"


def cached_bytes(world: World) -> Iterator[str]:
    """Every page of the index, on the device and on the host, holds what its tokens say."""
    for number, (driver, rank) in enumerate(zip(world.drivers, world.ranks, strict=True)):
        facts = rank_view(driver).facts
        for tier, said, memory in (
            ("device", facts.device, rank.memory.device),
            ("host", facts.host, rank.memory.host),
        ):
            wrong = [page for page, value in said.cached.items() if memory[page] != value]
            if wrong:
                yield f"bytes: rank {number}: cached {tier} pages {wrong} hold something else"


def _tier(table: PageTable, counts: Counts, n_aside: int) -> TierFacts:
    used = table.live()
    counted = counts_of_rank(counts, table.n_pages, n_aside)
    return TierFacts(
        capacity=table.n_pages,
        counts={part: getattr(counted, part) for part in PARTS},
        n_aside=min(n_aside, table.n_pages - len(used)),
        free_pages=table.free_pages(),
        used_pages=used,
    )


def bytes_and_owners(
    number: int, world: World, facts: RankFacts, held: Iterable[Job]
) -> Iterator[str]:
    """Every page of a ready or running request holds what its tokens say, and is nobody else's."""
    device = world.ranks[number].memory.device
    users: dict[int, tuple[PageValue, str]] = {}
    for job in held:
        table = job.tables[number]
        n_pages = job.n_pages_with_kv
        if len(table) < n_pages:
            yield f"bytes: rank {number}: {job.rid} has {len(table)} pages for {n_pages}"
            continue
        for position in range(n_pages):
            page, right = table[position], job.value(position)
            found = device[page]
            if found is not right:
                if found != right:
                    yield f"bytes: rank {number}: page {position} of {job.rid} holds {found!r}"
                    break
                device[page] = right  # equal, and from now on quick to compare
            user, name = users.setdefault(page, (right, job.rid))
            if user is not right and user != right:
                yield f"isolation: rank {number}: page {page} is of {name} and of {job.rid}"
        free = facts.device.free_pages
        if not free.isdisjoint(table):
            yield f"conservation: rank {number}: pages of {job.rid} are free"


def leaks(world: World) -> Iterator[str]:
    """After everything has ended: what is neither free nor cached, or still under way."""
    for number, (driver, rank) in enumerate(zip(world.drivers, world.ranks, strict=True)):
        snapshot = driver.snapshot()
        left = {
            "requests": len(snapshot.requests),
            "tickets": snapshot.n_tickets,
            "drains": snapshot.n_drains,
            "ways down": snapshot.n_descents,
            "growths": snapshot.n_growths,
            "device pins": snapshot.n_device_pins,
            "host pins": snapshot.n_host_pins,
            "device pages": driver.page_table(Tier.DEVICE).n_pages
            - len(driver.page_table(Tier.DEVICE).free_pages())
            - snapshot.device.cached,
            "host pages": driver.page_table(Tier.HOST).n_pages
            - len(driver.page_table(Tier.HOST).free_pages())
            - snapshot.host.cached,
            "effects in flight": sum(1 for _access in rank.accesses()),
            # One that is silent to the end is told, and never confirms it.
            "conversations whose prefill node was not told of their end": sum(
                not talk.is_aborted for _node, talk in rank.peers.open_talks()
            ),
            "watches": len(driver.state.local.watches),
        }
        for what, n_left in left.items():
            if n_left:
                yield f"leak: rank {number}: {n_left} {what} are left"


def tally(claims: Iterable[str]) -> Mapping[str, int]:
    """How many claims each checker has found broken."""
    found: dict[str, int] = defaultdict(int)
    for claim in claims:
        found[claim.partition(":")[0]] += 1
    return found
