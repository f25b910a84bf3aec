"""What is in place before anything happens in a world."""

from enum import Enum

from attrs import frozen

from kvlift.core.adopt import adopt_agreed
from kvlift.core.agreed import Agreed, agreed_at_start
from kvlift.core.local import Local
from kvlift.core.policy import Policy, Switch
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier
from kvlift.models.worlds.ghost import DevicePage, HostPage, Rank, tag_of


class Placed(Enum):
    """Where a page is put before anything happens."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


@frozen(kw_only=True)
class Put:
    prompt: Prompt
    start: int
    stop: int
    place: Placed
    rank: int | None = None


def opened(
    policy: Policy, puts: tuple[Put, ...], storage: Switch, n_ranks: int
) -> tuple[Agreed, list[Rank]]:
    """The agreed state, and one rank's half for each rank, with these pages in place."""
    agreed = agreed_at_start(policy, storage)
    device: list[DevicePage] = []
    host: list[HostPage] = []
    for put in puts:
        if put.place is Placed.STORAGE:
            continue
        tier = Tier.DEVICE if put.place is Placed.DEVICE else Tier.HOST
        agreed, _decision, adopted = adopt_agreed(
            agreed, tier, put.prompt, put.start, put.stop, policy
        )
        tags = [tag_of(put.prompt, at) for at in adopted.positions]
        device += map(DevicePage, adopted.device, tags)
        host += map(HostPage, adopted.host, tags)
    ranks = []
    for number in range(n_ranks):
        stored = {
            tag_of(put.prompt, page)
            for put in puts
            if put.place is Placed.STORAGE and put.rank in (None, number)
            for page in range(put.start, put.stop)
        }
        ranks.append(
            Rank(local=Local(), device=tuple(device), host=tuple(host), stored=frozenset(stored))
        )
    return agreed, ranks
