"""The journal: everything is in it, it is private, and it never holds the tick up."""

import errno
import json
import logging
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvlift.core.prompt import token_bytes
from kvlift.core.tier import Tier
from kvlift.runtime import journal as journal_module
from kvlift.runtime import journal_file
from kvlift.runtime.config import Config, ConfigError
from kvlift.runtime.driver import Driver
from kvlift.runtime.explain import explain
from kvlift.runtime.journal import Ring, path_of_rank
from kvlift.runtime.journal_lines import FORMAT, Header, IdleLine, encoded, without_zeros
from kvlift.runtime.journal_read import JournalError
from kvlift.runtime.observers import Observers, observers_for
from kvlift.runtime.replay import replay
from kvlift.testing.sim_peers import PrefillNode, SimPeers
from kvlift.testing.sim_rank import SimRank, sim_ranks
from tests.runtime.journal_world import FIELDS, JournalWorld, ports_of, prompt_of


def observed(config: Config, n_ranks: int = 1) -> Iterator[tuple[Driver, Observers, SimRank]]:
    """Drivers whose observers are those that their config asks for."""
    node = PrefillNode("p", n_ranks)
    for rank in sim_ranks(n_ranks, config.device_pages, config.host_pages, None, node):
        ports = ports_of(rank)
        observers = observers_for(config, ports)
        yield Driver(config, ports, observers.observer), observers, rank


def lone(**fields: object) -> tuple[Driver, Observers, SimRank]:
    return next(observed(Config.parse({**FIELDS, **fields})))


def play(driver: Driver, rid: str = "A") -> None:
    driver.submit(rid, prompt_of(16), peer="p")
    for _ in range(8):
        driver.tick()
    driver.run(rid)
    driver.tick()
    driver.finish(rid, token_bytes([5]))
    for _ in range(8):
        driver.tick()


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def kinds(lines: list[bytes]) -> list[str]:
    return [json.loads(line)["line"] for line in lines]


# What is in it.


def test_the_first_line_holds_the_config_and_says_that_prompts_are_inside() -> None:
    world = JournalWorld(n_ranks=2)
    header = json.loads(world.journal(1)[0])
    assert (header["line"], header["format"]) == ("journal", FORMAT)
    assert (header["rank"], header["n_ranks"], header["has_storage"]) == (1, 2, True)
    assert Config.parse(header["config"]) == world.drivers[1].config
    assert "prompts" in header["note"]
    assert "private" in header["note"]


def test_idle_ticks_are_one_line_however_many_there_are() -> None:
    world = JournalWorld()
    world.tick(500)
    world.submit("A", prompt_of(8))
    world.tick()
    lines = [json.loads(line) for line in world.journal()]
    assert [line["line"] for line in lines] == ["journal", "idle", "tick"]
    assert lines[1]["n"] == 500
    assert lines[2]["tick"] == 501


def test_idle_ticks_at_the_end_are_written_when_the_driver_closes() -> None:
    world = JournalWorld()
    world.live("A", prompt_of(8))
    world.tick(100)
    world.close()
    assert json.loads(world.journal()[-1])["n"] >= 100
    assert replay(world.journal()).ticks == world.drivers[0].snapshot().tick


@given(st.lists(st.integers(-3, 3) | st.just(0), max_size=400), st.integers(0, 300))
def test_a_ballot_comes_back_from_its_short_form(values: list[int], n_zeros: int) -> None:
    least = (*values, *([0] * n_zeros))
    short = without_zeros(least)
    assert short == () or short[-1] != 0
    assert short + (0,) * (len(least) - len(short)) == least


def test_growths_adoptions_and_new_limits_are_written_where_they_happened() -> None:
    world = JournalWorld(n_ranks=2)
    world.call("adopt", Tier.DEVICE, prompt_of(8), 0, 2)
    world.submit("A", prompt_of(8))
    world.tick(8)
    world.call("run", "A")
    world.tick()
    world.call("grow", "A", 2)
    world.call("reconfigure", evolve(world.drivers[0].config, bypass_max=3))
    world.tick()
    world.call("finish", "A", token_bytes([1]))
    world.tick(8)
    world.close()
    told = [kind for kind in kinds(world.journal()) if kind not in ("tick", "idle")]
    assert told == ["journal", "adopt", "grow", "config"]
    assert replay(world.journal(0)).identical
    assert replay(world.journal(1)).identical


def test_a_fault_of_a_port_is_written_by_its_class_and_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = JournalWorld()

    def broken(*_args: object) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(SimPeers, "send_hold", broken)
    world.submit("A", prompt_of(8))
    world.tick()
    fault = json.loads(world.journal()[-1])
    assert fault == {"line": "fault", "effect": "SendHold", "error": "OSError: no such device"}


# Files.


def test_the_file_is_private_and_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "run.ndjson"
    driver, _observers, _rank = lone(journal="file", journal_path=str(path))
    play(driver)
    driver.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    result = replay(lines_of(path))
    assert result.identical
    assert (result.ticks, result.requests) == (driver.snapshot().tick, 1)


def test_lines_are_in_the_file_while_the_driver_lives(tmp_path: Path) -> None:
    path = tmp_path / "run.ndjson"
    driver, _observers, _rank = lone(journal="file", journal_path=str(path))
    play(driver)
    written = threading.Event()
    for _ in range(200):
        if path.read_bytes().count(b"BecameReady"):
            written.set()
            break
        written.wait(0.02)
    assert written.is_set()
    driver.close()


def test_each_rank_has_a_file_of_its_own(tmp_path: Path) -> None:
    config = Config.parse({**FIELDS, "journal": "file", "journal_path": str(tmp_path / "a.ndjson")})
    drivers = [driver for driver, _observers, _rank in observed(config, n_ranks=2)]
    for driver in drivers:
        driver.tick()
    for driver in drivers:
        driver.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.rank0.ndjson", "a.rank1.ndjson"]
    assert path_of_rank(Path("x/run"), 1, 2) == Path("x/run.rank1")


def test_a_restart_keeps_the_journal_from_before(tmp_path: Path) -> None:
    path = tmp_path / "run.ndjson"
    driver, _observers, _rank = lone(journal="file", journal_path=str(path))
    play(driver)
    driver.close()
    before = path.read_bytes()
    again, _observers, _rank = lone(journal="file", journal_path=str(path))
    again.close()
    assert (tmp_path / "run.ndjson.1").read_bytes() == before
    assert kinds(lines_of(path)) == ["journal"]


def test_a_link_in_the_place_of_the_journal_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "precious"
    other.write_text("mine")
    path = tmp_path / "run.ndjson"
    path.symlink_to(other)
    driver, _observers, _rank = lone(journal="file", journal_path=str(path))
    play(driver)
    driver.close()
    assert other.read_text() == "mine"
    assert not path.is_symlink()


def test_a_journal_that_cannot_be_made_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name another journal_path"):
        lone(journal="file", journal_path=str(tmp_path / "missing" / "run.ndjson"))


def test_a_full_disk_ends_the_journal_and_not_the_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    n_writes = 0
    write = journal_file.write_whole

    def full(descriptor: int, data: bytes) -> None:
        nonlocal n_writes
        n_writes += 1
        if n_writes > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(descriptor, data)

    monkeypatch.setattr(journal_file, "write_whole", full)
    path = tmp_path / "run.ndjson"
    driver, _observers, _rank = lone(journal="file", journal_path=str(path))
    with caplog.at_level(logging.ERROR, logger="kvlift.journal"):
        play(driver, "A")
        play(driver, "B")
        driver.close()
    assert driver.snapshot().requests == ()
    assert [r.getMessage() for r in caplog.records] == [
        f"the journal {path} ends early: [Errno 28] No space left on device"
    ]
    assert len(lines_of(path)) == 3
    assert replay(lines_of(path)).identical


def test_a_disk_that_hangs_ends_the_journal_and_not_the_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()
    monkeypatch.setattr(journal_file, "write_whole", lambda _fd, _data: released.wait(30))
    monkeypatch.setattr(journal_file, "BEHIND_LINES_MAX", 3)
    driver, _observers, _rank = lone(
        journal="file", journal_path=str(tmp_path / "run.ndjson"), close_deadline_ms=20
    )
    with caplog.at_level(logging.ERROR, logger="kvlift.journal"):
        play(driver)
        driver.close()
    released.set()
    assert driver.snapshot().requests == ()
    assert ["does not keep up" in r.getMessage() for r in caplog.records] == [True]


# Rings.


def test_a_ring_that_has_lost_nothing_can_be_replayed(tmp_path: Path) -> None:
    driver, observers, _rank = lone(journal="ring")
    play(driver)
    assert observers.journal is not None
    observers.journal.dump(tmp_path / "ring.ndjson")
    result = replay(lines_of(tmp_path / "ring.ndjson"))
    assert result.identical
    assert result.ticks == driver.snapshot().tick
    assert stat.S_IMODE((tmp_path / "ring.ndjson").stat().st_mode) == 0o600


def test_a_ring_that_has_lost_its_beginning_says_so(tmp_path: Path) -> None:
    driver, observers, _rank = lone(journal="ring", journal_ring_ticks=10)
    play(driver, "A")
    play(driver, "B")
    assert observers.journal is not None
    path = tmp_path / "ring.ndjson"
    observers.journal.dump(path)
    lines = lines_of(path)
    assert len(lines) == 11
    assert json.loads(lines[0])["n_lost"] > 0
    with pytest.raises(JournalError, match="nothing can be decided again without them"):
        replay(lines)
    told = [one.text for one in explain(lines, "B")]
    assert "lost its first" in told[0]
    assert "ended: done" in told


def test_a_ring_with_a_path_is_written_when_the_driver_closes(tmp_path: Path) -> None:
    path = tmp_path / "ring.ndjson"
    driver, _observers, _rank = lone(journal="ring", journal_path=str(path))
    play(driver)
    assert not path.exists()
    driver.close()
    assert replay(lines_of(path)).identical


def test_a_ring_is_dumped_from_another_thread_while_ticks_go_on(tmp_path: Path) -> None:
    driver, observers, _rank = lone(journal="ring", journal_ring_ticks=50)
    journal = observers.journal
    assert journal is not None
    dumped: list[bool] = []

    def dump() -> None:
        for number in range(20):
            journal.dump(tmp_path / f"{number}.ndjson")
            dumped.append(True)

    thread = threading.Thread(target=dump)
    thread.start()
    for number in range(12):
        play(driver, f"r{number}")
    thread.join(20)
    assert len(dumped) == 20
    for number in range(20):
        assert kinds(lines_of(tmp_path / f"{number}.ndjson"))[0] == "journal"


def test_a_ring_keeps_no_more_tokens_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "RING_BYTES_MAX", 1000)
    ring = Ring(1_000_000)
    for _ in range(50):
        ring.put(IdleLine(n=1), 100)
    assert len(ring.lines()) == 10
    assert ring.n_lost == 40


def test_only_a_ring_can_be_dumped(tmp_path: Path) -> None:
    driver, observers, _rank = lone(journal="file", journal_path=str(tmp_path / "a.ndjson"))
    assert observers.journal is not None
    with pytest.raises(TypeError, match="only a ring"):
        observers.journal.dump(tmp_path / "b.ndjson")
    driver.close()


# Wiring.


def test_without_a_journal_in_the_config_there_is_none() -> None:
    driver, observers, _rank = lone()
    play(driver)
    assert observers.journal is None
    assert b"kvlift_ticks_total" in observers.metrics.exposition()


def test_what_happened_by_chance_is_written_and_decided_again_on_every_rank() -> None:
    for seed in range(6):
        world = JournalWorld(n_ranks=1 + seed % 2)
        world.act_by_chance(Random(seed), 60)
        world.close()
        for rank, driver in enumerate(world.drivers):
            result = replay(world.journal(rank))
            assert result.identical, f"seed {seed} rank {rank}: {result.first_difference}"
            assert result.ticks == driver.snapshot().tick
            assert result.last is not None
            assert result.last.digest.hex() == driver.snapshot().digest


def test_a_header_is_one_line() -> None:
    header = Header(format=FORMAT, config={}, has_storage=False, rank=0, n_ranks=1)
    assert encoded(header).count(b"\n") == 1
