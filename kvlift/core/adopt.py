"""Pages that are good already and only need a place: a warm start, or a host that fills its own.

Between ticks, on all ranks alike, like a growth. Pages that the tier has are left as they are.
"""

from attrs import evolve, frozen

from kvlift.core.advance import Decision, closed_draft
from kvlift.core.agreed import Agreed
from kvlift.core.draft import Draft
from kvlift.core.ids import DeviceHandle, HostHandle
from kvlift.core.index import Segment
from kvlift.core.policy import Policy
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier


@frozen(kw_only=True)
class Adopted:
    """New pages to fill, by position in the prompt; one of the two is empty."""

    positions: tuple[int, ...]
    device: tuple[DeviceHandle, ...] = ()
    host: tuple[HostHandle, ...] = ()


def adopt_agreed(
    agreed: Agreed, tier: Tier, prompt: Prompt, start: int, stop: int, policy: Policy
) -> tuple[Agreed, Decision, Adopted]:
    """Give the pages [start, stop) of a prompt a place in a tier. No room: `LookupError`.

    Idle pages of other prompts make room, as for any other page."""
    draft = Draft(agreed, policy)
    draft.index.extend(prompt, stop, now=draft.moment(), priority=0)
    lacking: list[tuple[Segment, int]] = []
    page = start
    draft.index.pin(tier, prompt, 0, stop)
    for segment in list(draft.index.cover(prompt, start, stop)):
        if (segment.device if tier is Tier.DEVICE else segment.host) is None:
            lacking.append((segment, page))
        page += segment.n_pages
    adopted = _fill(draft, tier, lacking)
    draft.index.unpin(tier, prompt, 0, stop)
    draft.collect_evicted()
    after, decision = closed_draft(draft)
    return evolve(after, tick=agreed.tick), decision, adopted


def _fill(draft: Draft, tier: Tier, lacking: list[tuple[Segment, int]]) -> Adopted:
    n_pages = sum(segment.n_pages for segment, _page in lacking)
    positions = tuple(page + n for segment, page in lacking for n in range(segment.n_pages))
    if tier is Tier.DEVICE:
        if n_pages > draft.n_device_free() + draft.index.n_device_idle:
            raise LookupError(f"the device has no room for {n_pages} pages more")
        device = draft.take_device(n_pages)
        at = 0
        for segment, _page in lacking:
            draft.index.set_device(
                draft.index.segments[segment.id], device[at : at + segment.n_pages]
            )
            at += segment.n_pages
        return Adopted(positions=positions, device=device)
    if n_pages > draft.n_host_free() + draft.index.n_host_idle:
        raise LookupError(f"the host has no room for {n_pages} pages more")
    host = draft.take_host(n_pages)
    at = 0
    for segment, _page in lacking:
        draft.index.set_host(draft.index.segments[segment.id], host[at : at + segment.n_pages])
        at += segment.n_pages
    return Adopted(positions=positions, host=host)
