"""What a story does to the inside of a driver, which no host may: cached pages out of nowhere."""

from hashlib import blake2b

from attrs import evolve, frozen

from kvlift.core.advance import State
from kvlift.core.draft import Draft
from kvlift.core.index import device_pages, host_pages
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier
from kvlift.effects.pages import PageTable
from kvlift.runtime.config import Config
from kvlift.runtime.driver import Driver


@frozen
class Inside:
    """The page tables of a driver, and what its rank has set aside."""

    device: PageTable
    host: PageTable
    n_device_aside: int
    n_host_aside: int


def inside_of(driver: Driver) -> Inside:
    aside = driver._aside
    return Inside(driver._device, driver._host, aside[Tier.DEVICE], aside[Tier.HOST])


def put_page(driver: Driver, tier: Tier, prompt: Prompt) -> int | None:
    """Cache the last page of a prompt in a tier; its physical page, None where it is there already.

    To be called on every rank. Raises `LookupError` when the tier has no room.
    """
    draft = Draft(driver.state.agreed, driver.config.policy())
    position = prompt.n_pages_full - 1
    draft.index.extend(prompt, position + 1, now=draft.moment(), priority=0)
    (segment,) = draft.index.cover(prompt, position, position + 1)
    if (segment.device if tier is Tier.DEVICE else segment.host) is not None:
        return None
    if tier is Tier.DEVICE:
        if draft.n_device_free() + draft.index.n_device_idle < 1:
            raise LookupError("the device has no room for another page")
        draft.index.set_device(segment, draft.take_device(1))
    else:
        if draft.n_host_free() + draft.index.n_host_idle < 1:
            raise LookupError("the host has no room for another page")
        draft.index.set_host(segment, draft.take_host(1))
    before = driver.state.agreed
    agreed = evolve(
        before,
        clock=draft.clock,
        index=draft.index.frozen(),
        ledger=draft.ledger,
        digest=blake2b(before.digest + repr(draft.effects).encode(), digest_size=16).digest(),
    )
    driver._state = State(agreed=agreed, local=driver.state.local)
    driver._run(draft.effects)
    if tier is Tier.DEVICE:
        return driver._device.resolve(device_pages(agreed.index, prompt, position + 1)[-1:])[0]
    return driver._host.resolve(host_pages(agreed.index, prompt, position, position + 1))[0]


def reconfigure(driver: Driver, config: Config) -> None:
    """New limits for a running driver; sizes and the length of ballots stay."""
    driver.config = config
    driver._policy = config.policy()
    driver._limits = config.limits()
