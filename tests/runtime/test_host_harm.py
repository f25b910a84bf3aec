"""What a host, its disk or its clients can do wrong without taking a driver down."""

import logging
import time
from pathlib import Path

import pytest
from attrs import evolve

from kvlift.core.prompt import Prompt, token_bytes
from kvlift.runtime.config import JournalMode
from kvlift.runtime.driver import Driver
from kvlift.runtime.hosts.vllm_handover import peer_of
from kvlift.runtime.interpret import Ports
from kvlift.runtime.journal_file import FileSink
from kvlift.runtime.observers import Observers, observers_for
from kvlift.testing.sim_peers import PrefillNode
from kvlift.testing.sim_rank import sim_ranks
from tests.runtime.test_driver import CONFIG, PAGE

PROMPT = Prompt(bytes(32), token_bytes(range(8)), PAGE)
HALF = "\ud800"


def driver_with_journal(mode: JournalMode, path: Path) -> tuple[Driver, Observers]:
    config = evolve(CONFIG, journal=mode, journal_path=str(path), close_deadline_ms=2000)
    (sim,) = sim_ranks(1, 8, 8, None, PrefillNode("prefill", 1))
    ports = Ports(
        copies=sim.copies, store=sim.store, peers=sim.peers, ranks=sim.ranks, clock=sim.clock
    )
    observers = observers_for(config, ports)
    return Driver(config, ports, observers.observer), observers


@pytest.mark.parametrize(
    ("rid", "peer", "priority", "n_pages_output", "fault"),
    [
        (HALF, "prefill", 0, 0, "not valid Unicode"),
        ("a", f"tcp://{HALF}:1", 0, 0, "not valid Unicode"),
        ("a", "prefill", 1 << 63, 0, "64-bit"),
        ("a", "prefill", -(1 << 63) - 1, 0, "64-bit"),
        ("a", "prefill", 0, -1, "0 pages or more"),
    ],
)
def test_what_nobody_could_digest_or_write_is_refused_at_once(
    tmp_path: Path, rid: str, peer: str, priority: int, n_pages_output: int, fault: str
) -> None:
    driver, observers = driver_with_journal(JournalMode.FILE, tmp_path / "run.ndjson")
    with driver:
        with pytest.raises(ValueError, match=fault):
            driver.submit(rid, PROMPT, peer=peer, priority=priority, n_pages_output=n_pages_output)
        driver.submit("b", PROMPT, peer="prefill", priority=(1 << 63) - 1)
        assert any(driver.tick().ready for _ in range(8))
        assert observers.journal is not None
        sink = observers.journal._sink
        assert isinstance(sink, FileSink)
        sink.flush(5)
        assert sink._thread.is_alive()
        assert not sink._has_stopped


def test_a_line_that_cannot_be_encoded_ends_the_journal_with_a_word_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver, observers = driver_with_journal(JournalMode.FILE, tmp_path / "run.ndjson")
    assert observers.journal is not None
    with caplog.at_level(logging.ERROR, "kvlift.journal"):
        observers.journal.failed(object(), ValueError(HALF))
        driver.tick()
        deadline_s = time.monotonic() + 10
        while not caplog.records and time.monotonic() < deadline_s:
            time.sleep(0.005)
        assert "ends early: UnicodeEncodeError" in caplog.text
        assert driver.close()


def test_a_ring_that_cannot_be_written_at_the_end_is_a_word_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver, _ = driver_with_journal(JournalMode.RING, tmp_path / "gone" / "run.ndjson")
    driver.tick()
    with caplog.at_level(logging.ERROR, "kvlift.journal"):
        assert driver.close()
    assert "could not be written" in caplog.text


@pytest.mark.parametrize("word", [HALF, "tcp://a\n:1", ""])
def test_a_word_of_a_client_that_cannot_be_shown_is_no_peer(word: str) -> None:
    params = {
        "do_remote_prefill": True,
        "kvlift_addresses": ["tcp://a:1"],
        "remote_request_id": "r",
        "kvlift_namespace": bytes(32).hex(),
    }
    assert peer_of(params, bytes(32)) == "tcp://a:1#r"
    assert peer_of(params | {"kvlift_addresses": [word]}, bytes(32)) == ""
    assert peer_of(params | {"remote_request_id": word}, bytes(32)) == ""
