"""All stories hold, and the runner says so in the documented words; a broken one does not."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvlift.cli.story import story
from kvlift.testing.story_run import run_file, run_text

HERE = Path(__file__).parents[1] / "stories"
SHARED = Path(__file__).parents[3] / "shared" / "stories"
FILES = sorted(HERE.glob("*.story")) + (sorted(SHARED.glob("*.story")) if SHARED.is_dir() else [])
COLD = "world ranks=2 device=16\nprompt A pages=4\nsubmit A\nexpect within 10 ticks A ready\n"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_story_holds(path: Path) -> None:
    verdict = run_file(path)
    assert verdict.exit_code == 0, str(verdict)


def test_a_story_that_holds_passes() -> None:
    assert str(run_text(COLD, "cold.story")) == "PASS cold.story"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("expect A running", "expected A running, found ready"),
        ("expect A not ready", "expected A not ready, found ready"),
        ("expect within 2 ticks A done", "found ready"),
        ("expect A sources peer=3", "found device=0 host=0 storage=0 peer=4 recompute=0"),
        ("expect A promise=1", "found promise=0"),
        ("expect A wants 1:4", "found wants 0:4"),
        ("expect A wants nothing", "found wants 0:4"),
        ('expect A error contains "no"', "found the error ''"),
        ("expect A hit device=9", "found device=4 host=0 storage=0"),
        ("expect tier device free>=13", "free=12"),
        ("expect tier host free=0 rank=1", "on rank 1"),
        ("expect grow A granted", "found not asked"),
        ("expect count lookups A 7", "found 1 lookups on rank 0"),
        ("expect store has A", "found the store of rank 0 lacks page 0, 1, 2, 3"),
        ("expect effects StartRestore=1", "found"),
        ("expect peer told abort A", "found rank 0 has not told the peer"),
        ("expect ballots 9", "found"),
        ("expect diverged", "no divergence was reported"),
        ("expect idle", "A ready"),
        ("run A\ntick\nfinish A output=20", "too few"),
        ("retract B", "no submission of it"),
    ],
)
def test_an_expectation_that_does_not_hold_says_what_was_found(line: str, found: str) -> None:
    text = "world ranks=2 device=16\nconfig persist=off\nprompt A pages=4\nprompt B pages=2\n"
    begin = text + "submit A\nexpect within 10 ticks A ready\n"
    verdict = run_text(begin + line, "x.story")
    assert verdict.exit_code == 1
    assert verdict.line == 6 + len(line.splitlines())
    assert found in verdict.message


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("land store A", "nothing to land: store has nothing for A"),
        ("fail copies A", "nothing to fail"),
        ("again copies A", "nothing to again"),
        ("late store A", "nothing"),
        ("land writes", "nothing to land"),
        ("silence peer\nland peer A", "answers no more"),
        ("corrupt A[2] in storage", "not in storage"),
        ("config prefetch=sometimes", "prefetch"),
        ("config colour=blue", "no field 'colour'"),
        ("prompt C pages=3 tokens=4", "full pages"),
        ("put A in device rank=0\nput A in device rank=1", "no room"),
    ],
)
def test_a_line_that_asks_for_what_cannot_be_is_an_error_of_the_story(
    lines: str, reason: str
) -> None:
    text = "world ranks=2 device=2\nprompt A pages=4\n" + lines
    verdict = run_text(text, "x.story")
    assert verdict.exit_code == 2
    assert verdict.line == len(text.splitlines())
    assert reason in verdict.message


def test_the_pages_of_a_story_are_compared_with_what_they_must_hold() -> None:
    text = (
        "world page=4 device=8\nconfig write=none persist=off\nprompt A pages=2\n"
        "put A in host\nports held copies\nsubmit A\ntick 6\n"
    )
    right = text + "land copies A\nexpect within 6 ticks A ready\nexpect A bytes ok\n"
    assert run_text(right, "x").exit_code == 0
    wrong = text + "expect A bytes ok\n"
    assert run_text(wrong, "x").line == 8


def test_a_rank_that_enters_its_tick_alone_waits() -> None:
    text = "world ranks=2\nprompt A pages=2\nsubmit A\ntick rank=1\n"
    for _ in range(9):
        text += "tick rank=1\n"
    assert run_text(text + "expect A queued\n", "x").exit_code == 0
    text += "tick rank=0\n" + "tick rank=0\ntick rank=1\n" * 9
    assert run_text(text + "expect A ready\n", "x").exit_code == 0


def test_prompts_continue_with_their_answers() -> None:
    text = COLD + (
        "run A\ntick\ngrow A 1\nfinish A output=1\nexpect within 9 ticks A done\n"
        "prompt B from=A[0:5] pages=6\nprompt C like=A pages=5\nprompt D like=A tenant=blue\n"
        "expect B hit device=5\nexpect C hit device=5\nexpect D hit device=0\n"
    )
    assert str(run_text(text, "x")) == "PASS x"


def test_the_command_prints_a_line_a_story_and_ends_with_the_worst(tmp_path: Path) -> None:
    good, bad, odd = tmp_path / "good.story", tmp_path / "bad.story", tmp_path / "odd.story"
    good.write_text(COLD)
    bad.write_text(COLD + "expect A done\n")
    odd.write_text("tick tock\n")
    missing = tmp_path / "missing.story"
    runner = CliRunner()
    assert runner.invoke(story, [str(good)]).exit_code == 0
    assert runner.invoke(story, [str(bad), str(good)]).exit_code == 1
    result = runner.invoke(story, [str(one) for one in (odd, missing, bad, good)])
    assert result.exit_code == 2
    lines = result.output.splitlines()
    assert lines[0].startswith(f"ERROR {odd}:1  ")
    assert lines[1].startswith(f"ERROR {missing}:1  cannot be read")
    assert lines[2] == f"FAIL {bad}:5  expected A done, found ready"
    assert lines[3] == f"PASS {good}"
    result = runner.invoke(story, ["--json", str(bad), str(good)])
    assert json.loads(result.stdout) == [
        {"file": str(bad), "ok": False, "line": 5, "message": "expected A done, found ready"},
        {"file": str(good), "ok": True, "line": None, "message": ""},
    ]


def test_a_trace_shows_events_verdicts_phases_and_effects(tmp_path: Path) -> None:
    good = tmp_path / "good.story"
    good.write_text(COLD)
    output = CliRunner().invoke(story, ["--trace", str(good)]).output
    assert "3: submit A" in output
    assert "tick 1\n" in output
    assert "rank 1  phase    A: - -> queued" in output
    assert "rank 0  effect   SendHold" in output
    assert "rank 0  event    PagesArrived(" in output
    assert "rank 1  verdict  " in output
