"""A journal has a bound on the disk, goes on from file to file, and ends with what ended it."""

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvlift.cli.main import main
from kvlift.core.advance import advance_agreed
from kvlift.core.ballot import RanksDiverged
from kvlift.core.effect import StartMirror
from kvlift.core.policy import Switch
from kvlift.core.prompt import token_bytes
from kvlift.effects.ports import RankLate
from kvlift.runtime.config import Config, ConfigError
from kvlift.runtime.driver import Driver
from kvlift.runtime.explain import explain
from kvlift.runtime.journal_file import created, earlier
from kvlift.runtime.journal_read import JournalError
from kvlift.runtime.lending import LendingScheduler
from kvlift.runtime.observers import observers_for, observers_of_scheduler
from kvlift.runtime.replay import replay
from kvlift.testing.sim_peers import PrefillNode
from kvlift.testing.sim_rank import sim_ranks
from tests.runtime.journal_world import FIELDS, JournalWorld, ports_of, prompt_of
from tests.runtime.test_hosted import Host

SMALL = 1 << 16


def one_life(driver: Driver, rid: str, first: int) -> None:
    driver.submit(rid, prompt_of(16, first), peer="p")
    for _ in range(8):
        driver.tick()
    driver.run(rid)
    driver.tick()
    driver.finish(rid, token_bytes([5]))
    for _ in range(8):
        driver.tick()


def lived(path: Path, n_lives: int, **fields: object) -> Driver:
    """A driver that has closed after so many requests; its journal is a file."""
    config = Config.parse({**FIELDS, "journal": "file", "journal_path": str(path), **fields})
    [rank] = sim_ranks(1, config.device_pages, config.host_pages, None, PrefillNode("p", 1))
    ports = ports_of(rank)
    driver = Driver(config, ports, observers_for(config, ports).observer)
    for number in range(n_lives):
        one_life(driver, f"r{number}", 100 * number)
    driver.close()
    return driver


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def header_of(path: Path) -> dict[str, object]:
    header: dict[str, object] = json.loads(lines_of(path)[0])
    return header


# Parts.


def test_a_journal_goes_on_in_another_file_where_one_is_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.ndjson"
    driver = lived(path, 60, journal_bytes_max=SMALL, journal_files_max=50)
    n_parts = len(list(tmp_path.iterdir()))
    parts = [*(earlier(path, number) for number in range(n_parts - 1, 0, -1)), path]
    assert len(parts) > 3
    assert [header_of(part)["part"] for part in parts] == list(range(1, len(parts) + 1))
    assert len({header_of(part)["begun_ns"] for part in parts}) == 1
    for part in parts:
        assert part.stat().st_size <= SMALL
        assert stat.S_IMODE(part.stat().st_mode) == 0o600
    assert main(["replay", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ticks"], found["requests"]) == (driver.snapshot().tick, 60)
    assert main(["explain", str(path), "r3"]) == 0
    assert "ended: done" in capsys.readouterr().out
    assert main(["replay", str(parts[1]), "--json"]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["requests"] < 60


def test_the_disk_never_holds_more_than_the_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.ndjson"
    lived(path, 60, journal_bytes_max=SMALL, journal_files_max=2)
    assert {part.name for part in tmp_path.iterdir()} == {"run.ndjson", "run.ndjson.1"}
    assert header_of(tmp_path / "run.ndjson.1")["n_lost"] != 0
    assert main(["replay", str(path)]) == 2
    assert "nothing can be decided again without them" in capsys.readouterr().err
    assert main(["explain", str(path), "r59"]) == 0
    assert "lost its first" in capsys.readouterr().out


def test_one_file_may_be_all_that_is_kept(tmp_path: Path) -> None:
    lived(tmp_path / "run.ndjson", 12, journal_bytes_max=SMALL, journal_files_max=1)
    assert [part.name for part in tmp_path.iterdir()] == ["run.ndjson"]


def test_a_second_run_moves_the_first_one_on_and_is_read_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.ndjson"
    for n_lives in (1, 2, 3, 4, 5):
        lived(path, n_lives, journal_files_max=3)
    assert {p.name for p in tmp_path.iterdir()} == {"run.ndjson", "run.ndjson.1", "run.ndjson.2"}
    for name, n_requests in (("run.ndjson", 5), ("run.ndjson.1", 4), ("run.ndjson.2", 3)):
        assert main(["replay", str(tmp_path / name), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["requests"] == n_requests


def test_a_part_that_is_missing_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.ndjson"
    lived(path, 60, journal_bytes_max=SMALL, journal_files_max=50)
    n_parts = len(list(tmp_path.iterdir()))
    first, last = lines_of(tmp_path / f"run.ndjson.{n_parts - 1}"), lines_of(path)
    with pytest.raises(JournalError, match=f"part {n_parts} of this journal follows part 1"):
        replay([*first, *last])


def test_files_move_on_in_order_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for number in range(5):
        with open(created(path, 3), "w") as file:
            file.write(str(number))
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a": "4", "a.1": "3", "a.2": "2"}


def test_a_bound_that_holds_no_line_is_refused() -> None:
    with pytest.raises(ConfigError, match="journal_bytes_max must be from 65536"):
        Config.parse({"journal_bytes_max": 1000})
    with pytest.raises(ConfigError, match="journal_files_max must be from 1"):
        Config.parse({"journal_files_max": 0})


# A tick that raises.


def test_a_divergence_is_the_last_line_and_is_raised_again() -> None:
    world = JournalWorld(n_ranks=2)
    world.submit("A", prompt_of(16))
    world.submit("B", prompt_of(16, 100))
    world.tick()
    world.drivers[1].abort("A")  # one rank alone: the host broke its promise
    for driver in world.drivers:
        driver.tick()
    for driver in world.drivers:
        with pytest.raises(RanksDiverged):
            driver.tick()
    line = json.loads(world.journal()[-1])
    assert (line["line"], line["tick"], line["during"]) == ("raised", 3, "judging")
    assert line["error"] == "RanksDiverged"
    result = replay(world.journal())
    assert result.identical
    assert result.raised is not None
    assert result.raised.startswith("tick 3 raised RanksDiverged while judging: ranks differ in")
    told = [one.text for one in explain(world.journal(), "A")]
    assert "raised RanksDiverged" in told[-1]


def test_a_late_rank_is_the_last_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    world = JournalWorld(n_ranks=2)
    world.submit("A", prompt_of(16))
    world.tick()
    world.drivers[0].tick()
    with pytest.raises(RankLate):
        world.drivers[0].tick()
    path = tmp_path / "run.ndjson"
    path.write_bytes(b"".join(world.journal()))
    assert main(["replay", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["raised"].startswith("tick 3 raised RankLate while waiting: no verdict within")
    assert main(["replay", str(path)]) == 0
    assert "raised RankLate" in capsys.readouterr().out
    assert main(["explain", str(path), "A"]) == 0
    assert "raised RankLate" in capsys.readouterr().out.splitlines()[-1]


def test_what_the_core_raises_is_raised_again_or_is_a_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_args: object, **_named: object) -> None:
        raise ZeroDivisionError("a bug of the core")

    world = JournalWorld()
    world.live("A", prompt_of(16))
    world.submit("B", prompt_of(16))
    monkeypatch.setattr("kvlift.runtime.driver.advance", broken)
    with pytest.raises(ZeroDivisionError):
        world.tick()
    result = replay(world.journal())
    assert result.first_difference is not None
    assert result.first_difference.endswith("it raised ZeroDivisionError, the core raises nothing")
    monkeypatch.setattr("kvlift.runtime.replay.advance_agreed", raising_once_told(world))
    assert replay(world.journal()).identical


def raising_once_told(world: JournalWorld) -> Callable[..., object]:
    """A core with the same bug: it raises when `B` comes."""

    def advance(agreed: object, verdict: object, calls: list[object], policy: object) -> object:
        if any(getattr(call, "rid", "") == "B" for call in calls):
            raise ZeroDivisionError
        return advance_agreed(agreed, verdict, calls, policy)  # type: ignore[arg-type]

    return advance


def test_a_divergence_that_was_made_up_is_a_difference() -> None:
    world = JournalWorld()
    world.live("A", prompt_of(16))
    lines = world.journal()
    tick = world.drivers[0].snapshot().tick + 1
    world.close()
    made_up = {
        "line": "raised", "tick": tick, "now_ns": 0, "during": "deciding",
        "error": "RanksDiverged", "words": "",
    }  # fmt: skip
    idle = [line for line in world.journal()[len(lines) :] if b"idle" in line]
    result = replay([*lines, *idle, json.dumps(made_up).encode() + b"\n"])
    assert result.first_difference is not None
    assert "it raised RanksDiverged, the core raises nothing" in result.first_difference


def test_the_last_words_are_in_the_file_before_the_host_hears_of_it(tmp_path: Path) -> None:
    path = tmp_path / "run.ndjson"
    config = Config.parse({**FIELDS, "journal": "file", "journal_path": str(path)})
    ranks = sim_ranks(2, config.device_pages, config.host_pages, None, PrefillNode("p", 2))
    ports = ports_of(ranks[0])
    driver = Driver(config, ports, observers_for(config, ports).observer)
    driver.submit("A", prompt_of(16), peer="p")
    driver.tick()
    with pytest.raises(RankLate):
        driver.tick()
    assert json.loads(lines_of(tmp_path / "run.rank0.ndjson")[-1])["line"] == "raised"
    driver.close()


# One scheduler, many workers.


def hosted_life(host: Host, rid: str, n_tokens: int) -> None:
    host.scheduler.submit(rid, prompt_of(n_tokens), peer="p")
    host.until_ready(rid)
    host.scheduler.run(rid)
    host.step()
    host.scheduler.grow(rid, 1)
    host.scheduler.finish(rid, token_bytes([16]))
    for _ in range(8):
        host.step()


def test_a_schedulers_journal_is_decided_again_and_its_metrics_count(tmp_path: Path) -> None:
    path = tmp_path / "run.ndjson"
    config = Config.parse({**FIELDS, "journal": "file", "journal_path": str(path)})
    observers = observers_of_scheduler(config, storage=Switch.ON, n_workers=3)
    host = Host(n_workers=3, observer=observers.observer)
    hosted_life(host, "a", 16)
    host.scheduler.submit("b", prompt_of(20), peer="p")
    for _ in range(3):
        host.ballots = []  # the workers' answers are too late for the next step
        host.step()
    host.until_ready("b")
    host.scheduler.close()
    result = replay(lines_of(path))
    assert result.identical, result.first_difference
    assert (result.ticks, result.requests) == (host.scheduler.state.agreed.tick, 2)
    assert "ended: done" in [one.text for one in explain(lines_of(path), "a")]
    assert b'kvlift_calls_total{call="Submit",rank="0"} 2.0' in observers.metrics.exposition()


def test_a_scheduler_whose_workers_differ_says_so_in_its_last_line(tmp_path: Path) -> None:
    config = Config.parse({**FIELDS, "journal": "ring"})
    observers = observers_of_scheduler(config, storage=Switch.ON, n_workers=2)
    host = Host(n_workers=2, observer=observers.observer)
    host.scheduler.submit("a", prompt_of(16), peer="p")
    host.step()
    wrong = list(host.ballots[1])
    wrong[0] += 1
    wrong[1] -= 1
    with pytest.raises(RanksDiverged):
        host.scheduler.tick([host.ballots[0], wrong])
    assert observers.journal is not None
    observers.journal.dump(tmp_path / "run.ndjson")
    result = replay(lines_of(tmp_path / "run.ndjson"))
    assert result.identical
    assert (
        result.raised
        == "tick 2 raised RanksDiverged while judging: ranks differ in 'tick' at tick 1"
    )


def test_pages_that_a_host_stows_between_two_ticks_are_decided_again(tmp_path: Path) -> None:
    config = Config.parse({**FIELDS, "journal": "ring", "device_tier": "off"})
    observers = observers_of_scheduler(config, storage=Switch.ON, n_workers=2)
    held: list[int] = []
    scheduler = LendingScheduler(
        config,
        storage=Switch.ON,
        held=held.extend,
        released=held.extend,
        observer=observers.observer,
    )
    scheduler.tick([])
    scheduler.stow(prompt_of(16), 0, [7, 8, 9, 10])
    _tick, orders = scheduler.tick([])
    assert any(isinstance(effect, StartMirror) for effect in orders.effects)
    assert observers.journal is not None
    observers.journal.dump(tmp_path / "run.ndjson")
    lines = lines_of(tmp_path / "run.ndjson")
    assert json.loads(lines[2])["is_stow"] is True
    result = replay(lines)
    assert result.identical, result.first_difference
    assert result.last is not None
    assert result.last.digest == scheduler.state.agreed.digest
