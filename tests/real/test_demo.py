"""`kvlift demo` as users run it: real processes, a real model, and a page spoilt on purpose."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(240)]

QUICK = ("--ranks", "2", "--conversations", "2", "--rounds", "3", "--modes", "none,all")
RUN_S = 200

HEEDS_CTRL_C = """
import signal, sys
from kvlift.cli.main import main
# Under a shell's background job it would be ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""


def run(folder: Path, *args: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON, and standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "kvlift", "demo", "--json", "--out", str(folder), *args],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def test_the_main_job_holds_and_storage_is_reused_after_the_flush(tmp_path: Path) -> None:
    code, result, told = run(tmp_path, *QUICK)
    assert (code, result["faults"]) == (0, []), told
    assert result["tokens_identical"] is True
    assert result["logprob_diff_max"] < 1e-4
    assert result["pages_verified"] > 0
    assert result["pages_wrong"] == result["leaks"] == 0
    assert result["ballots_per_tick_max"] == 1
    none, full = result["modes"]["none"], result["modes"]["all"]
    assert none["requests"] == full["requests"] == 6
    assert none["failed"] == full["failed"] == 0
    assert none["hit"]["device"] == none["hit"]["host"] == none["hit"]["storage"] == 0
    assert full["hit"]["storage"] > 0
    assert sum(full["hit"].values()) == none["hit"]["peer"]
    assert full["bytes_from_peer"] < none["bytes_from_peer"]
    rounds = [(row["round"], row["mode"], row["is_after_flush"]) for row in result["rounds"]]
    assert rounds == [(n, mode, n > 1) for mode in ("none", "all") for n in (1, 2, 3)]
    report = (tmp_path / "report.html").read_text()
    assert report.count("<svg") == 3
    assert "→ device" in report


def test_a_page_that_is_spoilt_on_purpose_is_noticed(tmp_path: Path) -> None:
    code, result, told = run(
        tmp_path, *QUICK, "--rounds", "2", "--modes", "all", "--corrupt-one-page"
    )
    assert code == 1
    assert result["pages_damaged"] == 1
    assert result["pages_wrong"] >= 1
    assert result["logprob_diff_max"] > 1e-4
    assert result["tokens_identical"] is False
    assert "as asked with --corrupt-one-page" in told
    assert result["modes"]["all"]["failed"] == result["leaks"] == 0


def test_a_trace_is_played_over_one_rank(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 40 * i, "input_length": 2000, "output_length": 300, "hash_ids": [0, 1, 2, i]}
        for i in range(3, 15)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = ("--trace", str(trace), "--requests", "10", "--ranks", "1", "--modes", "all")
    code, result, told = run(tmp_path, *args)
    assert (code, result["faults"]) == (0, []), told
    assert result["modes"]["all"]["requests"] == 10
    assert result["modes"]["all"]["hit"]["storage"] > 0


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    demo = subprocess.Popen(
        [sys.executable, "-c", HEEDS_CTRL_C, "demo", "--out", str(tmp_path / "out")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
        start_new_session=True,
    )
    try:
        until_s = time.monotonic() + 60
        children: list[int] = []
        while len(children) < 3 and time.monotonic() < until_s:
            time.sleep(0.2)
            children = children_of(demo.pid)
        assert len(children) == 3
        time.sleep(2)
        os.killpg(demo.pid, signal.SIGINT)
        _, told = demo.communicate(timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            demo.kill()
    assert demo.returncode == 130
    assert told.strip().splitlines()[-1] == "kvlift: interrupted"
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    assert list(scratch.iterdir()) == []
