"""Drivers in odd moments: what a rank may say, and when."""

from typing import Any

import pytest
from attrs import evolve, frozen

from kvlift.core.ballot import RankFailed
from kvlift.core.policy import Switch
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.core.tier import Tier
from kvlift.effects.ports import Store
from kvlift.runtime.config import Config, ConfigError
from kvlift.runtime.driver import Driver
from kvlift.runtime.errors import PromptTooLong, TooManyRequests
from kvlift.runtime.interpret import Ports
from kvlift.testing.sim_peers import PrefillNode
from kvlift.testing.sim_rank import SimRank, sim_ranks

PAGE = 2


@frozen
class BrokenStore:
    """A store with a bug, and nothing wrong with it otherwise."""

    real: Store

    def forget_all(self) -> None:
        raise RuntimeError("a bug of this port")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def driver_of(rank: SimRank, config: Config, store: Store | None) -> Driver:
    ports = Ports(
        copies=rank.copies, store=store, peers=rank.peers, ranks=rank.ranks, clock=rank.clock
    )
    return Driver(config, ports)


def prompt_of(n_tokens: int) -> Prompt:
    tokens = b"".join(n.to_bytes(4, "little") for n in range(n_tokens))
    return Prompt(bytes(32), tokens, PAGE)


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_a_rank_that_fails_while_nothing_is_under_way_waits_for_the_ballot_of_all(
    n_ranks: int,
) -> None:
    """Sent alone, its ballot waits to the deadline for ranks that have nothing to say."""
    config = Config(page_tokens=PAGE, device_pages=8, host_pages=8)
    ranks = sim_ranks(n_ranks, 8, 8, None, PrefillNode("prefill", n_ranks))
    drivers = [driver_of(rank, config, rank.store) for rank in ranks[:-1]]
    drivers.append(driver_of(ranks[-1], config, BrokenStore(ranks[-1].store)))
    for driver in drivers:
        driver.flush([Tier.STORAGE])
    for _ in range(3):
        assert [driver.tick().is_busy for driver in drivers] == [False] * n_ranks
    for driver in drivers:
        driver.submit("A", prompt_of(4), peer="prefill")
        driver.tick()
    for driver in drivers:
        with pytest.raises(RankFailed):
            driver.tick()


def test_a_lone_rank_that_fails_says_so_at_once() -> None:
    config = Config(page_tokens=PAGE, device_pages=8, host_pages=8)
    [rank] = sim_ranks(1, 8, 8, None, PrefillNode("prefill", 1))
    driver = driver_of(rank, config, BrokenStore(rank.store))
    driver.flush([Tier.STORAGE])
    driver.tick()
    with pytest.raises(RankFailed) as failed:
        driver.tick()
    assert "a bug of this port" in str(failed.value.__cause__)


def test_storage_that_nobody_has_is_not_attached() -> None:
    """Its lookups would be answered by nobody: 30 s a request, and its writes would never end."""
    config = Config(page_tokens=PAGE, device_pages=8, host_pages=8)
    [rank] = sim_ranks(1, 8, 8, None, PrefillNode("prefill", 1))
    driver = driver_of(rank, config, None)
    driver.detach_storage()
    with pytest.raises(ConfigError, match="no store"):
        driver.attach_storage()
    driver.submit("A", prompt_of(4), peer="prefill")
    assert sum(len(driver.tick().ready) for _ in range(6)) == 1


def test_an_answer_that_can_never_come_back_is_refused_and_holds_no_line() -> None:
    config = Config(page_tokens=PAGE, device_pages=8, host_pages=8, bypass_max=0)
    [rank] = sim_ranks(1, 8, 8, None, PrefillNode("prefill", 1))
    driver = driver_of(rank, config, rank.store)
    driver.submit("A", prompt_of(4), peer="prefill")
    ready = [one for _ in range(6) for one in driver.tick().ready]
    driver.run("A")
    driver.tick()
    with pytest.raises(PromptTooLong):
        driver.retract("A", token_bytes(range(14)))
    assert driver.tick().refused == ()
    driver.retract("A", token_bytes(range(13)))
    driver.tick()
    driver.resume("A")
    ready += [one for _ in range(8) for one in driver.tick().ready]
    assert [(one.rid, len(one.device_pages)) for one in ready] == [("A", 2), ("A", 8)]


def test_whose_the_device_pages_are_cannot_change_while_a_driver_runs() -> None:
    config = Config(page_tokens=PAGE, device_pages=8, host_pages=8)
    [rank] = sim_ranks(1, 8, 8, None, PrefillNode("prefill", 1))
    driver = driver_of(rank, config, rank.store)
    with pytest.raises(ConfigError, match="device_tier"):
        driver.reconfigure(evolve(config, device_tier=Switch.OFF))


def test_how_many_requests_there_may_be_can_change_while_a_driver_runs() -> None:
    config = Config(page_tokens=PAGE, device_pages=8, host_pages=8, requests_max=1)
    [rank] = sim_ranks(1, 8, 8, None, PrefillNode("prefill", 1))
    driver = driver_of(rank, config, rank.store)
    prompt = Prompt(bytes(32), token_bytes(range(4)), PAGE)
    driver.submit("A", prompt, peer="prefill")
    with pytest.raises(TooManyRequests):
        driver.submit("B", prompt, peer="prefill")
    driver.reconfigure(evolve(config, requests_max=2))
    driver.submit("B", prompt, peer="prefill")
