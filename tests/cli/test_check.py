"""`kvlift check` from the outside, on worlds made for it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvlift.cli import check as check_module
from kvlift.cli.main import main
from kvlift.models.charts import all_edge_names

WORLDS = '''
from kvlift.models.claim import Always, Live, Move, Share, Sometimes, World
from kvlift.models.worlds import CALM_SHARE

class Steps(World[int]):
    def __init__(self, n, limit):
        self.name, self.n, self.limit = "steps", n, limit
    def claims(self):
        return (Always("stays low", lambda n: n < self.limit), Sometimes("at 1", lambda n: n == 1),
                Live("arrives", lambda n: n == self.n),
                Share(CALM_SHARE, lambda n: n == self.n, lambda n: n == self.n))
    def initial(self):
        return [0]
    def moves(self, state):
        if state < self.n:
            yield Move(f"tick {state}", state + 1, "tick")
    def canonical(self, state):
        return state
    def story_preamble(self):
        return "world ranks=1"
    def edges_taken(self):
        return ["mirror: Due --MirrorStarted--> Mirroring", "nobody: A --knows--> This"]

def good(*, deep):
    """Three steps."""
    return Steps(9 if deep else 3, 100)

def bad(*, deep):
    """Three steps, one too many."""
    return Steps(3, 3)

def endless(*, deep):
    return Steps(10**9, 10**9)

WORLDS = {"good": good, "bad": bad, "endless": endless}
'''

MUTANTS = """
from attrs import frozen

@frozen
class Found:
    name: str
    killed: bool
    by: str | None
    steps: int | None

def run(on_progress):
    on_progress(1, 1)
    return [Found("no lock", True, "stays low", 3), Found("no key", {killed}, None, None)]
"""


@pytest.fixture
def worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "worlds_of_the_check_test.py").write_text(WORLDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    monkeypatch.setattr(check_module, "REGISTRY", "worlds_of_the_check_test")
    return tmp_path


def answer(capfd: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any]:
    code = main(["check", *args, "--json"])
    return code, json.loads(capfd.readouterr().out)


def test_worlds_that_hold_end_with_code_0(worlds: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, found = answer(capfd, "good")
    assert code == 0
    (world,) = found["worlds"]
    assert {world[key] for key in ("states", "transitions", "depth")} == {4, 3}
    assert world["complete"] is True
    assert world["always"] == {"nothing raises": True, "stays low": True}
    assert world["sometimes"] == {"at 1": True}
    assert world["live"] == {"arrives": True}
    assert found["edges_covered"] == 1  # arrows that are in no table don't count
    assert found["edges_total"] == len(all_edge_names()) > 40
    assert found["calm_done_from_cache"] == 1.0
    assert found["core_branch_coverage"] is None
    assert "mutants" not in found


def test_a_broken_claim_is_a_story_and_ends_with_code_1(
    worlds: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, found = answer(capfd, "bad", "good")
    assert code == 1
    assert [world["name"] for world in found["worlds"]] == ["bad", "good"]
    story = "# stays low\nworld ranks=1\ntick 0\ntick 1\ntick 2\n"
    assert found["worlds"][0]["always"]["stays low"] == story
    assert main(["check", "bad"]) == 1
    printed = capfd.readouterr().out
    assert f"bad: always 'stays low' does not hold:\n\n{story}" in printed
    assert "1 of 4 broken" in printed


def test_limits_and_deep_reach_the_worlds(worlds: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, found = answer(capfd, "endless", "--max-states", "50")
    assert (found["worlds"][0]["complete"], found["worlds"][0]["states"]) == (False, 51)
    _, found = answer(capfd, "endless", "--seconds", "0.1")
    assert found["worlds"][0]["complete"] is False
    assert answer(capfd, "good", "--deep")[1]["worlds"][0]["states"] == 10


def test_a_world_that_reaches_a_limit_is_no_pass(
    worlds: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for limit in (("--max-states", "50"), ("--seconds", "0.1")):
        assert main(["check", "good", "endless", *limit, "--json"]) == 1
        said = capfd.readouterr()
        assert [world["complete"] for world in json.loads(said.out)["worlds"]] == [True, False]
        assert "1 of 2 worlds reached a limit" in said.err
        assert "(endless)" in said.err
    assert main(["check", "endless", "--max-states", "50"]) == 1


def test_branches_are_measured_when_asked_for(
    worlds: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("coverage")
    assert answer(capfd, "good", "--coverage")[1]["core_branch_coverage"] == 0.0


def test_the_worlds_are_listed(worlds: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, found = answer(capfd, "--list")
    assert code == 0
    assert found["worlds"][0] == {"name": "good", "about": "Three steps."}
    assert main(["check", "--list"]) == 0
    assert capfd.readouterr().out.splitlines() == [
        "good     Three steps.",
        "bad      Three steps, one too many.",
        "endless",
    ]


def test_mutants_that_live_end_with_code_1(
    worlds: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for killed in (True, False):
        name = f"mutants_killed_{killed}".lower()
        (worlds / f"{name}.py").write_text(MUTANTS.format(killed=killed))
        monkeypatch.setattr(check_module, "MUTANTS", name)
        code, found = answer(capfd, "good", "--mutants")
        assert code == (0 if killed else 1)
        assert found["mutants"][0] == {
            "name": "no lock",
            "killed": True,
            "by": "stays low",
            "steps": 3,
        }


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["elsewhere"], "no world is called 'elsewhere': there are good, bad, endless"),
        (["--seconds", "0"], "--seconds"),
        (["--max-states", "0"], "--max-states"),
        (["good", "--mutants"], "--mutants needs"),
    ],
)
def test_a_wrong_call_ends_with_code_2_and_one_line(
    worlds: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    complaint: str,
) -> None:
    monkeypatch.setattr(check_module, "MUTANTS", "kvlift.no_such_module")
    assert main(["check", *args]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert complaint in printed.err
    assert len(printed.err.splitlines()) == 1


def test_an_interrupt_says_what_was_done_and_ends_with_code_130(worlds: Path) -> None:
    program = (
        "import sys; from kvlift.cli import check; from kvlift.cli.main import main; "
        "check.REGISTRY = 'worlds_of_the_check_test'; check._SECONDS_A_LINE = 0.0; "
        "sys.exit(main(['check', 'endless', 'good', '--deep', '--json', '--jobs', '1']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.environ["PYTHONPATH"]},
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert process.stderr.readline().startswith("endless: ")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    found = json.loads(said)
    assert process.returncode == 130
    assert found["interrupted"] is True
    (world,) = found["worlds"]
    assert (world["name"], world["complete"]) == ("endless", False)
    assert world["states"] > 1
