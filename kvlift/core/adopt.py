"""Pages that are good already and only need a place: a warm start, or a host that fills its own.

Between ticks, on all ranks alike, like a growth. Pages that the tier has are left as they are.

`stow_agreed` is for hosts whose own cache owns the device: pages that they have computed go down
from where they are.
"""

from attrs import evolve, frozen

from kvlift.core.advance import Decision, closed_draft
from kvlift.core.agreed import Agreed
from kvlift.core.descent import Reach
from kvlift.core.draft import Draft
from kvlift.core.ids import DeviceHandle, HostHandle
from kvlift.core.index import Segment
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier
from kvlift.core.way_down import begin_descent, settle_descents


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


def stow_agreed(
    agreed: Agreed, prompt: Prompt, start: int, stop: int, policy: Policy
) -> tuple[Agreed, Decision, Adopted]:
    """Take the pages [start, stop) of a prompt down, as far as the policy says.

    They are good and lie in the host's device pages, which it has to keep as they are until
    `FreeDevice` names the handles; those of pages that are below already are freed at once."""
    draft = Draft(agreed, policy)
    to_host = policy.write is not WritePolicy.NONE
    to_storage = policy.persist is Switch.ON and draft.storage is Switch.ON
    if not to_host and not to_storage:
        after, decision = closed_draft(draft)
        return evolve(after, tick=agreed.tick), decision, Adopted(positions=())
    draft.index.extend(prompt, stop, now=draft.moment(), priority=0)
    lacking: list[tuple[Segment, int]] = []
    page = start
    for segment in list(draft.index.cover(prompt, start, stop)):
        is_below = segment.host is not None or not to_host
        if segment.device is None and not (is_below and (segment.stored or not to_storage)):
            lacking.append((segment, page))
        page += segment.n_pages
    adopted = _fill(draft, Tier.DEVICE, lacking)
    if lacking:
        reach = Reach.BOTH if to_host and to_storage else Reach.HOST if to_host else Reach.STORAGE
        begin_descent(draft, prompt, stop, reach)
    settle_descents(draft)
    after, decision = closed_draft(draft)
    return evolve(after, tick=agreed.tick), decision, adopted
