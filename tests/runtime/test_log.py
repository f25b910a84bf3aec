"""The driver's log: tick, request and attempt in every line, and no tokens."""

import logging
import re

import pytest

from kvlift.core.prompt import token_bytes
from kvlift.core.tier import Tier
from kvlift.runtime.log import DriverLog, plain
from kvlift.testing.sim_peers import SimPeers
from tests.runtime.journal_world import JournalWorld, prompt_of

LINE = re.compile(r"^rank=\d+ tick=\d+ rid=\S+ attempt=(\d+|-) \S")


def logged(caplog: pytest.LogCaptureFixture, level: int) -> JournalWorld:
    caplog.set_level(level, logger="kvlift.driver")
    return JournalWorld(more=(DriverLog(rank=0),))


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.DEBUG) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= level]


def test_every_line_names_tick_request_and_attempt(caplog: pytest.LogCaptureFixture) -> None:
    world = logged(caplog, logging.DEBUG)
    world.live("A", prompt_of(16))
    world.call("adopt", Tier.HOST, prompt_of(8, 900), 0, 2)
    world.call("flush", [Tier.DEVICE, Tier.HOST])
    world.live("B", prompt_of(16))
    world.submit("B", prompt_of(16))
    world.tick(8)
    world.call("run", "B")
    world.tick()
    world.call("grow", "B", 1)
    world.call("retract", "B", token_bytes([1]))
    world.call("abort", "B")
    world.tick(9)
    lines = messages(caplog)
    assert len(lines) > 30
    assert [line for line in lines if not LINE.match(line)] == []
    assert any("rid=B attempt=3 Filling --AllLanded--> Ready" in line for line in lines)
    assert any("rid=A attempt=1 Draining --Drained--> Ended" in line for line in lines)
    assert any(line.endswith("rid=B attempt=2 done") for line in lines)


def test_at_info_a_life_is_three_lines(caplog: pytest.LogCaptureFixture) -> None:
    world = logged(caplog, logging.INFO)
    world.live("A", prompt_of(16))
    assert [re.sub(r"tick=\d+", "tick=n", line) for line in messages(caplog)] == [
        "rank=0 tick=n rid=A attempt=1 admitted, promise=0 peer=4",
        "rank=0 tick=n rid=A attempt=1 ready, peer=4",
        "rank=0 tick=n rid=A attempt=1 done",
    ]


def test_a_failed_request_is_a_warning_that_says_why(caplog: pytest.LogCaptureFixture) -> None:
    world = logged(caplog, logging.WARNING)
    world.node.refuse("A", "it is full\nrid=B attempt=9 forged", [])
    world.submit("A", prompt_of(16))
    world.tick(8)
    (line,) = messages(caplog, logging.WARNING)
    assert line.count("\n") == 0
    assert "rid=A attempt=1 failed: prefill node p refused the request" in line
    assert "it is full\\nrid=B" in line


def test_a_fault_of_a_port_is_an_error_without_the_prompt(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = logged(caplog, logging.ERROR)

    def broken(*_args: object) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(SimPeers, "send_hold", broken)
    world.submit("A", prompt_of(16))
    world.tick()
    (line,) = messages(caplog)
    assert LINE.match(line)
    assert line.endswith("rid=A attempt=1 SendHold failed: OSError: no such device")


def test_tokens_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    world = logged(caplog, logging.DEBUG)
    world.node.first_token = lambda _rid, _prompt: (77_777_777, -0.5)
    world.live("A", prompt_of(16, 55_555_000), 3)
    text = "\n".join(messages(caplog))
    assert "77777777" not in text
    assert "5555500" not in text
    assert repr(token_bytes([55_555_000]))[2:-1] not in text


def test_names_from_outside_are_made_plain_and_short() -> None:
    assert plain("a\nb\x1b[31m\u202e") == "a\\nb\\x1b[31m\\u202e"
    assert len(plain("x" * 10_000)) == 200
    assert len(plain("\n" * 10_000)) == 200


def test_nothing_is_formatted_where_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    world = logged(caplog, logging.CRITICAL)
    world.live("A", prompt_of(16))
    assert messages(caplog) == []
