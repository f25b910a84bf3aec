"""What stories read of a driver: the one file that knows how a driver shows itself."""

from collections.abc import Mapping

from attrs import asdict, frozen

from kvlift.core.counts import Counts
from kvlift.core.descent import Mirroring, Persisting
from kvlift.core.ids import Attempt, Ticket
from kvlift.core.index import ROOT, Index, Segment
from kvlift.core.policy import Switch
from kvlift.core.prompt import Prompt
from kvlift.effects.pages import PageTable
from kvlift.runtime.driver import Driver
from kvlift.runtime.snapshot import RequestView, Snapshot
from kvlift.testing.sim_memory import PageValue
from kvlift.testing.story_inside import inside_of
from kvlift.testing.watch import RankFacts, TierFacts

WORDS: Mapping[str, frozenset[str]] = {
    "filling": frozenset({"filling", "admitted"}),
    "admitted": frozenset({"filling", "admitted"}),
}


@frozen(kw_only=True)
class RankView:
    """One rank between two ticks.

    `words`: all state words that hold for each live request. `owners`: the attempt that a ticket
    was opened for; `paths`: the pages that a copy down or a write covers, as a prompt.
    """

    words: Mapping[str, frozenset[str]]
    sources: Mapping[str, Mapping[str, int]]
    digest: str
    facts: RankFacts
    owners: Mapping[Ticket, Attempt]
    paths: Mapping[Ticket, Prompt]
    attempts: Mapping[Attempt, str]
    is_storage_on: bool
    unfinished: str


def rank_view(driver: Driver) -> RankView:
    """Read one driver; changes nothing."""
    snapshot = driver.snapshot()
    agreed = driver.state.agreed
    latest = {request.rid: request for request in snapshot.requests}
    moving = [one for one in agreed.descents if isinstance(one.phase, Mirroring | Persisting)]
    paths = {
        one.phase.ticket: one.prompt.first_tokens(one.n_pages * one.prompt.page_tokens)
        for one in moving
        if isinstance(one.phase, Mirroring | Persisting)
    }
    return RankView(
        words={rid: _words(request) for rid, request in latest.items()},
        sources={
            rid: {source.value: n for source, n in request.n_pages_by_source.items()}
            for rid, request in latest.items()
            if request.n_pages_by_source
        },
        digest=snapshot.digest,
        facts=_facts(driver, snapshot),
        owners={
            ticket: Attempt(opened.owner)
            for ticket, opened in agreed.tickets.items()
            if ticket not in paths
        },
        paths=paths,
        attempts={request.attempt: request.rid for request in agreed.requests.values()},
        is_storage_on=agreed.storage is Switch.ON,
        unfinished=_unfinished(snapshot),
    )


def device_and_host_hit(driver: Driver, prompt: Prompt) -> tuple[int, int]:
    """Where the device's and the host's prefix of a fresh match end, in pages."""
    hit = driver.hit(prompt)
    return hit.device, hit.host


def _words(request: RequestView) -> frozenset[str]:
    ended = {request.outcome} & {"aborted", "failed"}
    words = WORDS.get(request.state, frozenset({request.state}))
    return words | frozenset(word for word in ended if word is not None)


def _facts(driver: Driver, snapshot: Snapshot) -> RankFacts:
    inside = inside_of(driver)
    index = driver.state.agreed.index
    device: dict[int, PageValue] = {}
    host: dict[int, PageValue] = {}
    for segment in index.segments.values():
        values = _values(index, segment)
        device.update(zip(segment.device or (), values, strict=False))
        host.update(zip(segment.host or (), values, strict=False))
    return RankFacts(
        device=_tier(inside.device, inside.n_device_aside, snapshot.device, device),
        host=_tier(inside.host, inside.n_host_aside, snapshot.host, host),
        open_tickets=frozenset(driver.state.agreed.tickets),
    )


def _values(index: Index, segment: Segment) -> list[PageValue]:
    """What the pages of a segment hold: all tokens from the root of the tree to each page's end."""
    size = len(segment.tokens) // segment.n_pages
    before, above = b"", segment
    while above.parent != ROOT:
        above = index.segments[above.parent]
        before = above.tokens + before
    return [
        PageValue(segment.namespace, before + segment.tokens[: size * (page + 1)])
        for page in range(segment.n_pages)
    ]


def _tier(
    table: PageTable, n_aside: int, counts: Counts, by_handle: Mapping[int, PageValue]
) -> TierFacts:
    used = table.live()
    return TierFacts(
        capacity=table.n_pages,
        counts=asdict(counts),
        n_aside=min(n_aside, table.n_pages - len(used)),
        free_pages=table.free_pages(),
        used_pages=used,
        cached={used[handle]: value for handle, value in by_handle.items() if handle in used},
    )


def _unfinished(snapshot: Snapshot) -> str:
    """What keeps a rank from being idle, apart from requests and pages."""
    counts = {
        "tickets": snapshot.n_tickets,
        "drains": snapshot.n_drains,
        "ways down": snapshot.n_descents,
        "growths": snapshot.n_growths,
        "device pins": snapshot.n_device_pins,
        "host pins": snapshot.n_host_pins,
    }
    return ", ".join(f"{n} {name}" for name, n in counts.items() if n)
