"""`kvlift replay`, `kvlift explain`: the same decisions, the first difference, or a clear error."""

import json
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from attrs import evolve
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvlift.cli.main import main
from kvlift.core.advance import Decision
from kvlift.core.agreed import Agreed
from kvlift.core.edges import EDGES
from kvlift.core.prompt import token_bytes
from kvlift.core.tier import Tier
from kvlift.runtime import journal_read
from kvlift.runtime import replay as replay_module
from kvlift.runtime.config import Config
from kvlift.runtime.driver import Driver
from kvlift.runtime.explain import explain
from kvlift.runtime.interpret import Ports
from kvlift.runtime.journal import Journal, header_of
from kvlift.runtime.journal_lines import FORMAT, ArrowRow, Decided, Header, decided_of, encoded
from kvlift.runtime.journal_read import JournalError
from kvlift.runtime.observer import Observer, Several
from kvlift.runtime.perfetto import trace
from kvlift.runtime.replay import ARROWS, replay
from kvlift.testing import story_stage
from kvlift.testing.story_run import run_file
from tests.runtime.journal_world import JournalWorld, Lines, prompt_of
from tests.source import ROOT

Change = Callable[[dict[str, Any]], None]


@cache
def recorded(n_ranks: int = 2, seed: int = 3) -> tuple[tuple[bytes, ...], ...]:
    """The journals of a busy group: all tiers, growth, retraction, adoption, new limits."""
    world = JournalWorld(n_ranks)
    world.live("A", prompt_of(16))
    world.call("flush", [Tier.DEVICE, Tier.HOST])
    world.tick()
    world.call("adopt", Tier.HOST, prompt_of(8, 5000), 0, 2)
    world.live("B", prompt_of(22))
    world.submit("C", prompt_of(18))
    world.tick(8)
    world.call("run", "C")
    world.tick()
    world.call("grow", "C", 2)
    world.call("retract", "C", token_bytes([1, 2]))
    world.tick(3)
    world.call("reconfigure", evolve(world.drivers[0].config, bypass_max=5))
    world.call("resume", "C")
    world.tick(6)
    world.act_by_chance(Random(seed), 25)
    world.close()
    return tuple(tuple(world.journal(rank)) for rank in range(n_ranks))


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "run.ndjson"
    path.write_bytes(b"".join(recorded()[0]))
    return path


def run_json(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, Any]:
    code = main([*(str(arg) for arg in args), "--json"])
    return code, json.loads(capsys.readouterr().out)


def changed(lines: tuple[bytes, ...], word: bytes, change: Change) -> tuple[list[bytes], int]:
    """The journal with the first line that has `word` changed, and that line's number."""
    at = next(n for n, line in enumerate(lines) if n and word in line)
    value = json.loads(lines[at])
    change(value)
    return [*lines[:at], json.dumps(value).encode() + b"\n", *lines[at + 1 :]], at + 1


# The same decisions.


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_of_a_group_decides_the_same_again(
    rank: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.ndjson"
    path.write_bytes(b"".join(recorded()[rank]))
    code, found = run_json(capsys, "replay", path)
    assert code == 0
    assert found["identical"] is True
    assert found["first_difference"] is None
    assert found["ticks"] > 60
    assert found["requests"] >= 3


def test_people_get_it_in_words(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(journal)]) == 0
    assert "all decisions are the same" in capsys.readouterr().out


def test_upto_stops_there_and_shows_the_state(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(journal), "--upto", "20"]) == 0
    out = capsys.readouterr().out
    assert "20 ticks" in out
    assert "after tick 20" in out
    assert "device:" in out
    for upto in (0, 1, 2, 7, 25, 50):
        assert run_json(capsys, "replay", journal, "--upto", upto)[1]["ticks"] == upto


def test_the_stories_are_decided_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stories go into every corner of the core."""
    sinks: list[Lines] = []

    def journaled(config: Config, ports: Ports, observer: Observer) -> Driver:
        rank, n_ranks = ports.ranks.rank, ports.ranks.n_ranks
        has_storage = ports.store is not None
        begin = header_of(config, has_storage=has_storage, rank=rank, n_ranks=n_ranks)
        sinks.append(Lines([begin]))
        return Driver(config, ports, Several((observer, Journal(begin, sinks[-1]))))

    monkeypatch.setattr(story_stage, "Driver", journaled)
    n_stories = 0
    for story in sorted((ROOT / "tests" / "stories").glob("*.story")):
        sinks.clear()
        run_file(story, None)
        for sink in sinks:
            result = replay([encoded(line) for line in sink.lines])
            assert result.identical, f"{story.name}: {result.first_difference}"
        n_stories += bool(sinks)
    assert n_stories > 10


# Differences.


def without_first_effect(line: dict[str, Any]) -> None:
    del line["decided"]["effects"][0]


def with_more_pages(line: dict[str, Any]) -> None:
    line["decided"]["effects"][0][4] += 1


def with_another_token(line: dict[str, Any]) -> None:
    (call,) = line["calls"]
    tokens = call["Submit"]["prompt"]["tokens"]
    call["Submit"]["prompt"]["tokens"] = "/" + tokens[1:]


def with_another_arrow(line: dict[str, Any]) -> None:
    line["decided"]["arrows"][0][2] = "Finished"


def with_a_legal_arrow_too_many(line: dict[str, Any]) -> None:
    line["decided"]["arrows"].append([1, "Ready", "Started", "Running"])


def with_another_mover(line: dict[str, Any]) -> None:
    line["decided"]["arrows"][0][0] += 1


def with_another_ticket_closed(line: dict[str, Any]) -> None:
    line["decided"]["closed"][0] += 1


def with_another_digest(line: dict[str, Any]) -> None:
    line["decided"]["digest"] = "00" * 16


def with_another_notice(line: dict[str, Any]) -> None:
    line["decided"]["notices"][0]["BecameReady"]["rid"] = "Z"


def without_calls(line: dict[str, Any]) -> None:
    del line["calls"]


def with_another_state_voted(line: dict[str, Any]) -> None:
    line["least"][6] += 1
    line["least"][7] -= 1


def with_ranks_apart(line: dict[str, Any]) -> None:
    line["least"][7] -= 1


def with_a_failed_rank(line: dict[str, Any]) -> None:
    line["least"][12] = 0


@pytest.mark.parametrize(
    ("word", "change", "named"),
    [
        (b"StartPrefetch", without_first_effect, "effects differ at place 1"),
        (b"StartMirror", with_more_pages, "effects differ"),
        (b"Submit", with_another_token, "the digest is"),
        (b"Admitted", with_another_arrow, "an arrow that the machine has not"),
        (b"Admitted", with_a_legal_arrow_too_many, "arrows differ at place"),
        (b"Admitted", with_another_mover, "arrows differ at place 1"),
        (b"closed", with_another_ticket_closed, "closed tickets differ at place 1"),
        (b"Admitted", with_another_digest, "the digest is"),
        (b"BecameReady", with_another_notice, "notices differ at place 1"),
        (b"Submit", without_calls, "effects differ at place 1"),
        (b"least", with_another_state_voted, "the ballot was about another 'state'"),
        (b"least", with_ranks_apart, "ranks differ in 'state'"),
        (b"least", with_a_failed_rank, "reported a failure of its own"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_changed_journal_shows_its_first_difference(
    word: bytes,
    change: Change,
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines, number = changed(recorded()[0], word, change)
    tick = json.loads(lines[number - 1])["tick"]
    path = tmp_path / "changed.ndjson"
    path.write_bytes(b"".join(lines))
    code, found = run_json(capsys, "replay", path)
    assert code == 1
    assert found["identical"] is False
    assert named in found["first_difference"]
    assert found["first_difference"].startswith(f"tick {tick}: ")
    assert found["ticks"] == tick - 1


def test_a_growth_that_was_changed_is_named() -> None:
    lines, _number = changed(
        recorded()[0], b'"grow"', lambda line: line.update(n_pages=line["n_pages"] + 1)
    )
    difference = replay(lines).first_difference
    assert difference is not None
    assert difference.startswith("the growth of 'C' after tick")


def test_an_edge_that_the_model_has_not_is_refused_even_where_the_core_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong core that takes a step of its own decides the same again; the table does not."""
    forged, number = changed(recorded()[0], b"Admitted", with_another_arrow)
    told = json.loads(forged[number - 1])["decided"]["arrows"][0]

    def decided_by_a_wrong_core(decision: Decision, agreed: Agreed) -> Decided:
        made = decided_of(decision, agreed)
        arrows = tuple(
            ArrowRow(row.owner, row.phase, told[2], row.after)
            if [row.owner, row.phase, row.after] == [told[0], told[1], told[3]]
            else row
            for row in made.arrows
        )
        return structs.replace(made, arrows=arrows)

    monkeypatch.setattr(replay_module, "decided_of", decided_by_a_wrong_core)
    difference = replay(forged).first_difference
    assert difference is not None
    assert difference.startswith(f"tick {json.loads(forged[number - 1])['tick']}: the journal has")
    assert " --Finished--> " in difference


def test_every_arrow_of_the_machines_may_be_recorded() -> None:
    assert {(a.__name__, e.__name__, b.__name__) for a, e, b in EDGES} <= ARROWS


def test_a_ballot_that_was_taken_out_is_a_difference() -> None:
    lines, number = changed(recorded()[0], b"least", lambda line: line.pop("least"))
    assert replay(lines).first_difference == f"tick {number - 1}: its ballot is missing"


def test_work_that_is_called_idle_is_a_difference() -> None:
    lines = list(recorded()[0])
    at = next(n for n, line in enumerate(lines) if b"least" in line)
    lines[at : at + 1] = [b'{"line":"idle","n":1}\n']
    assert replay(lines).first_difference == f"tick {at}: its ballot is missing"


# Journals that are none.


def header(config: dict[str, int | str], form: int = FORMAT) -> bytes:
    return encoded(Header(format=form, config=config, has_storage=True, rank=0, n_ranks=1))


def with_room_for_all(line: dict[str, Any]) -> None:
    line["least"][8] = 10**9


def with_a_huge_answer(line: dict[str, Any]) -> None:
    line["least"][-3:] = [10**15, 1, 10**15]


def with_too_long_a_ballot(line: dict[str, Any]) -> None:
    line["least"] += [0] * 100_000


def with_a_later_tick(line: dict[str, Any]) -> None:
    line["tick"] += 1


def with_other_pages(line: dict[str, Any]) -> None:
    line["calls"][0]["Submit"]["prompt"]["page_tokens"] = 0


def with_no_tokens(line: dict[str, Any]) -> None:
    line["calls"][0]["Submit"]["prompt"]["tokens"] = ""


def with_a_huge_output(line: dict[str, Any]) -> None:
    line["calls"][0]["Submit"]["n_pages_output"] = 10**12


def with_an_unknown_call(line: dict[str, Any]) -> None:
    line["calls"][0] = {"Shutdown": {}}


def with_two_calls_in_one(line: dict[str, Any]) -> None:
    line["calls"][0]["Abort"] = {"rid": "A"}


@pytest.mark.parametrize(
    ("word", "change", "named"),
    [
        (b"least", with_room_for_all, "more pages than the config has"),
        (b"least", with_a_huge_answer, "that no rank could give|not open"),
        (b"least", with_too_long_a_ballot, "is too long"),
        (b"least", with_a_later_tick, "lines are missing or moved"),
        (b"Submit", with_other_pages, "pages of 0 tokens"),
        (b"Submit", with_no_tokens, "empty"),
        (b"Submit", with_a_huge_output, "larger than the device"),
        (b"Submit", with_an_unknown_call, "there is no call 'Shutdown'"),
        (b"Submit", with_two_calls_in_one, "there is no call"),
        (b'"grow"', lambda line: line.update(n_pages=2**40), "a growth by"),
        (b'"adopt"', lambda line: line.update(stop=2**40), "pages that there are not"),
        (b'"adopt"', lambda line: line.update(tier="storage"), "pages that there are not"),
        (b'"idle"', lambda line: line.update(n=-5), "-5 idle ticks"),
        (b'"idle"', lambda line: line.update(n=2**62), "idle ticks"),
        (b'"config"', lambda line: line["config"].update(device_pages=8), "can't change"),
        (b'"config"', lambda line: line["config"].update(nonsense=8), "no field 'nonsense'"),
    ],
)
def test_what_no_driver_writes_is_an_error_with_its_line(
    word: bytes, change: Change, named: str
) -> None:
    lines, number = changed(recorded()[0], word, change)
    with pytest.raises(JournalError, match=named) as error:
        replay(lines)
    assert str(error.value).startswith(f"line {number}: ")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "a journal begins with"),
        (b"\n", "line 1: "),
        (b"hello\n", "line 1: "),
        (b"\x00\xff\xfe\n", "line 1: "),
        (b"[" * 100_000 + b"\n", "line 1: "),
        (b'{"line":"idle","n":3}\n', "a journal begins with"),
        (
            header({}, form=99),
            "format 99",
        ),
        (
            header({"device_pages": 2_000_000_000}),
            "pages in a tier",
        ),
        (
            header({"ballot_slots": 1}),
            "ballot_slots must be from",
        ),
    ],
)
def test_what_is_no_journal_ends_with_one_line_that_says_so(
    content: bytes, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.ndjson"
    path.write_bytes(content)
    for args in (["replay", str(path)], ["explain", str(path), "A"]):
        assert main(args) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert named in printed.err
        assert printed.err.count("\n") == 1


def test_a_file_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path / "none")]) == 2
    assert "none: No such file" in capsys.readouterr().err


def test_two_journals_in_one_file_are_refused() -> None:
    lines = recorded()[0]
    with pytest.raises(JournalError, match="two journals in one"):
        replay([*lines, *lines])


def test_a_line_without_an_end_is_not_read_whole(
    journal: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(journal_read, "LINE_BYTES_MAX", 3000)
    with journal.open("ab") as file:
        file.write(b"[" * 1_000_000)
    assert main(["replay", str(journal)]) == 2
    assert "longer than 3000 bytes" in capsys.readouterr().err


def test_half_a_line_at_the_end_is_left_out_and_told(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with journal.open("ab") as file:
        file.write(b'{"line":"tick","tick":9')
    assert main(["replay", str(journal)]) == 0
    assert "half a line" in capsys.readouterr().err


def test_a_billion_idle_ticks_take_no_time() -> None:
    lines = [recorded()[0][0], b'{"line":"idle","n":1000000000}\n']
    begin = time.perf_counter()
    assert replay(lines).ticks == 1_000_000_000
    assert time.perf_counter() - begin < 2


# Whatever somebody writes into it.


def _mutated(lines: tuple[bytes, ...], data: st.DataObject) -> list[bytes]:
    """One line changed: a value inside it replaced, bytes of it damaged, or the line moved."""
    numbers = st.integers(0, len(lines) - 1)
    at = data.draw(numbers)
    result = list(lines)
    match data.draw(st.sampled_from(["value", "value", "value", "bytes", "drop", "twice", "swap"])):
        case "value":
            value = json.loads(result[at])
            _replace_somewhere(value, data)
            result[at] = json.dumps(value).encode() + b"\n"
        case "bytes":
            raw = bytearray(result[at])
            place = data.draw(st.integers(0, len(raw) - 1))
            raw[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=6))
            result[at] = bytes(raw)
        case "drop":
            del result[at]
        case "twice":
            result.insert(at, result[at])
        case _:
            other = data.draw(numbers)
            result[at], result[other] = result[other], result[at]
    return result


OTHER_VALUES = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.integers(-3, 20),
    st.none(),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from([[], {}, [[]], "A", "storage", "StartRestore", "Finished", "AAAA", "back"]),
)


def _replace_somewhere(value: Any, data: st.DataObject) -> None:
    """Walk into the value by chance and change what is found there."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        inside = value[key]
        if isinstance(inside, dict | list) and inside and data.draw(st.integers(0, 4)):
            value = inside
            continue
        if data.draw(st.integers(0, 5)) == 0:
            del value[key]
        elif isinstance(inside, int) and data.draw(st.booleans()):
            value[key] = inside + data.draw(st.integers(-2, 2))
        else:
            value[key] = data.draw(OTHER_VALUES)
        return


@settings(
    max_examples=150, deadline=5000, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(st.data())
def test_any_change_of_a_journal_is_an_error_a_difference_or_harmless(data: st.DataObject) -> None:
    lines = recorded(1, 5)[0]
    changed_lines = _mutated(lines, data)
    result = None
    with suppress(JournalError):
        result = replay(changed_lines)
    if result is None:
        event("an error")
        with pytest.raises(JournalError, match=r"^line \d+: "):
            replay(changed_lines)
        return
    event("a difference" if result.first_difference else "harmless")
    assert result.identical == (result.first_difference is None)
    told = explain(changed_lines, "B")
    assert all(one.text for one in told)
    assert trace(changed_lines)["traceEvents"]


# The trace.


def test_the_trace_has_a_row_a_request_counters_a_tier_and_instants_of_the_rank(
    journal: Path, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    assert main(["replay", str(journal), "--perfetto", str(path)]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    value = json.loads(path.read_text())
    events = value["traceEvents"]
    rows = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"
    }
    slices = [e for e in events if e["ph"] == "X"]
    assert {rows[e["pid"], e["tid"]] for e in slices} >= {
        "A (attempt 1)",
        "B (attempt 2)",
        "C (attempt 3)",
    }
    of_b = [e for e in slices if rows[e["pid"], e["tid"]] == "B (attempt 2)"]
    assert [e["name"] for e in of_b] == ["Asking", "Filling", "Ready", "Running"]
    for one, other in pairwise(of_b):
        assert one["ts"] + one["dur"] == pytest.approx(other["ts"])
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert counters == {"device pages", "host pages", "in flight"}
    for e in events:
        if e["ph"] == "C" and e["name"] == "device pages":
            assert sum(e["args"].values()) == 16
    instants = {rows[e["pid"], e["tid"]] for e in events if e["ph"] == "i"}
    assert instants == {"rank 0 storage", "rank 0 copies", "rank 0 peers"}
    assert "token" not in path.read_text()


def test_the_trace_is_refused_where_it_cannot_be_written(
    journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(journal), "--perfetto", str(tmp_path / "no" / "t.json")]) == 2
    assert "name a file that can be written" in capsys.readouterr().err


# Explain.


def test_the_trace_is_never_written_over_the_journal(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = journal.read_bytes()
    other_name = journal.with_name("link.json")
    other_name.symlink_to(journal)
    for path in (journal, other_name):
        assert main(["replay", str(journal), "--perfetto", str(path)]) == 2
        assert "is the journal itself: name another file" in capsys.readouterr().err
    assert journal.read_bytes() == before


def test_the_journal_of_several_ranks_is_found_by_the_name_that_was_configured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (1, 0):
        (tmp_path / f"run.rank{rank}.ndjson").write_bytes(b"")
    for command in (["replay"], ["explain"]):
        asked = [*command, str(tmp_path / "run.ndjson"), *(["A"] if command == ["explain"] else [])]
        assert main(asked) == 2
        said = capsys.readouterr().err
        assert f"each rank has a journal of its own, as {tmp_path / 'run.rank0.ndjson'}" in said
    assert main(["replay", str(tmp_path / "other.ndjson")]) == 2
    assert "name a journal that can be read" in capsys.readouterr().err


def test_explain_tells_a_life_as_lines_and_as_json(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(journal), "B"]) == 0
    out = capsys.readouterr().out
    assert "admitted: pages 0 to 3 from storage" in out
    code, found = run_json(capsys, "explain", journal, "B")
    assert code == 0
    assert len(found["events"]) == len(out.splitlines())
    assert set(found["events"][0]) == {"tick", "ms", "attempt", "text"}


def test_explain_says_when_a_request_is_not_in_the_journal(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(journal), "nobody\n"]) == 2
    assert "does not name a request 'nobody" in capsys.readouterr().err


def test_both_commands_show_an_example_in_their_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("replay", "explain"):
        assert main([command, "--help"]) == 0
        assert "Example:" in capsys.readouterr().out
