"""Arguments of another kind than a call takes: told at once, not in the middle of a tick."""

from typing import Any

import pytest

from kvlift.core.prompt import Prompt, token_bytes
from kvlift.core.tier import Tier
from kvlift.runtime.config import Config
from kvlift.runtime.driver import Driver
from kvlift.runtime.errors import DriverClosed
from kvlift.runtime.interpret import Ports
from kvlift.testing.sim_peers import PrefillNode
from kvlift.testing.sim_rank import sim_ranks

PAGE = 2


def driver() -> Driver:
    [rank] = sim_ranks(1, 8, 8, None, PrefillNode("prefill", 1))
    ports = Ports(
        copies=rank.copies, store=rank.store, peers=rank.peers, ranks=rank.ranks, clock=rank.clock
    )
    return Driver(Config(page_tokens=PAGE, device_pages=8, host_pages=8), ports)


@pytest.mark.parametrize("output", [[7, 8], "78", b"abc", None, token_bytes([7]) + b"x"])
@pytest.mark.parametrize("call", ["finish", "retract"])
def test_an_output_that_is_no_buffer_of_tokens_is_refused_and_the_request_lives(
    call: str, output: Any
) -> None:
    one = driver()
    one.submit("A", Prompt(bytes(32), token_bytes([1, 2, 3]), PAGE), peer="prefill")
    with pytest.raises(ValueError, match=r"the output is no buffer of tokens: make it with token"):
        getattr(one, call)("A", output)
    assert not any(tick.ended for tick in (one.tick(), one.tick()))
    one.abort("A")
    assert [ended.rid for ended in one.tick().ended] == ["A"]


@pytest.mark.parametrize("tokens", [b"abc", [1, 2], token_bytes([1]) + b"x"])
def test_a_prompt_that_is_no_buffer_of_tokens_is_refused(tokens: Any) -> None:
    one = driver()
    with pytest.raises(ValueError, match="the prompt is no buffer of tokens"):
        one.submit("A", Prompt(bytes(32), tokens, PAGE), peer="prefill")
    assert not one.tick().is_busy


def test_a_prompt_in_pages_of_no_token_is_refused() -> None:
    one = driver()
    with pytest.raises(ValueError, match="the prompt's pages have 0 tokens, the cache's 2"):
        one.submit("A", Prompt(bytes(32), token_bytes([1]), 0), peer="prefill")


def test_a_tier_may_be_named_by_its_word_and_another_word_flushes_nothing() -> None:
    one = driver()
    words: Any = ["device", "attic"]
    with pytest.raises(ValueError, match="attic"):
        one.flush(words)
    assert one.tick().number == 1
    words = ["device", Tier.HOST]
    one.flush(words)
    one.tick()


def test_a_closed_driver_takes_no_request_that_could_not_end() -> None:
    one = driver()
    one.close()
    with pytest.raises(DriverClosed):
        one.submit("A", Prompt(bytes(32), token_bytes([1]), PAGE), peer="prefill")
