"""What a story asks of a driver beyond a host's calls: where pages are, and new ones."""

from attrs import frozen

from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier
from kvlift.effects.pages import PageTable
from kvlift.runtime.driver import Driver


@frozen
class Inside:
    """The page tables of a driver, and what its rank has set aside."""

    device: PageTable
    host: PageTable
    n_device_aside: int
    n_host_aside: int


def inside_of(driver: Driver) -> Inside:
    snapshot = driver.snapshot()
    return Inside(
        driver.page_table(Tier.DEVICE),
        driver.page_table(Tier.HOST),
        snapshot.n_device_aside,
        snapshot.n_host_aside,
    )


def put_page(driver: Driver, tier: Tier, prompt: Prompt) -> int | None:
    """Cache the last page of a prompt in a tier; its physical page, None where it is there already.

    To be called on every rank. Raises `LookupError` when the tier has no room.
    """
    position = prompt.n_pages_full - 1
    return driver.adopt(tier, prompt, position, position + 1).get(position)
