"""The chunks of the long simulation: added up, of one core only, and never played twice."""

import argparse
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from benches import simulate_deep


def chunk(first: int, core: str = "c") -> dict[str, object]:
    found: dict[str, object] = dict.fromkeys(simulate_deep.SUMS, 1)
    found |= {"seed": first, "ended": {"done": 3}, "hit": {"host": 2}, "faults": {"abort": first}}
    found["violations"] = [{"seed": first}] if first else []
    return {
        "command": f"kvlift simulate --seed {first}",
        "core": core,
        "seconds": 2,
        "date": f"2026-01-0{first + 1}",
        "found": found,
    }


def test_chunks_are_added_up_and_say_that_they_were_chunks() -> None:
    made = simulate_deep.merged([chunk(0), chunk(1), chunk(2)], "abc")
    result = made["result"]
    assert isinstance(result, dict)
    assert (result["seed"], result["seeds"], result["ended"]) == (0, 3, {"done": 9})
    assert result["faults"] == {"abort": 3}
    assert result["violations"] == [{"seed": 1}, {"seed": 2}]
    assert (made["core"], made["commit"], made["date"]) == ("c", "abc", "2026-01-03")
    assert "run in chunks" in str(made["note"])


def test_chunks_of_two_cores_are_not_one_result() -> None:
    with pytest.raises(SystemExit, match="of 2 cores"):
        simulate_deep.merged([chunk(0), chunk(1, "other")], "abc")


def test_a_run_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[str] = []

    def run(command: list[str], **_more: object) -> SimpleNamespace:
        played.append(command[command.index("--seed") + 1])
        return SimpleNamespace(returncode=0, stdout=json.dumps({"violations": []}), stderr=b"")

    monkeypatch.setattr(subprocess, "run", run)
    options = argparse.Namespace(out=tmp_path, seeds=250, chunk=100, ticks=5, ranks=1)
    (tmp_path / "chunk-100.json").write_text("{}")
    simulate_deep.play(options)
    assert played == ["0", "200"]
    assert json.loads((tmp_path / "chunk-200.json").read_text())["command"].endswith("--json")
    assert "--seeds 50" in json.loads((tmp_path / "chunk-200.json").read_text())["command"]
