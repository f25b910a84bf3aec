"""The command itself: help without torch, one-line errors, exit codes, clean interruption."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest

from kvlift.cli import output
from kvlift.cli.main import SUMMARIES, LazyGroup, kvlift, main
from tests.source import ROOT

ENVIRONMENT = {**os.environ, "COLUMNS": "100"}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvlift", *args]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)


def offered() -> list[str]:
    return LazyGroup().list_commands(click.Context(kvlift))


def test_help_lists_the_commands_without_loading_torch() -> None:
    script = (
        "import sys; from kvlift.cli.main import main; code = main(['--help']);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    for name in offered():
        assert f"  {name} " in done.stdout


def test_only_commands_that_are_installed_are_offered() -> None:
    assert "doctor" in offered()
    assert set(offered()) <= set(SUMMARIES)


@pytest.mark.parametrize("name", offered())
def test_every_command_has_an_example_and_its_summary(name: str) -> None:
    done = run(name, "--help")
    assert done.returncode == 0
    assert "Example" in done.stdout


@pytest.mark.parametrize("args", [["nope"], ["doctor", "--nope"], ["doctor", "--storage", "/no/x"]])
def test_a_wrong_call_is_answered_in_one_line(args: list[str]) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kvlift: ")
    assert done.stderr.count("\n") == 1
    assert "--help`)" in done.stderr


def test_no_command_is_a_call_for_help() -> None:
    done = run()
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: kvlift")


def test_the_version_is_one_line() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("kvlift ")


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (output.Unusable("there is no room: use another folder"), 2),
        (click.exceptions.Exit(1), 1),
        (click.exceptions.Exit(0), 0),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
    ],
)
def test_every_end_has_its_exit_code(
    raised: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    @click.command()
    def doctor() -> None:
        raise raised

    monkeypatch.setattr("kvlift.cli.doctor.doctor", doctor)
    assert main(["doctor"]) == code
    said = capfd.readouterr()
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == (code in (2, 130))


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def doctor() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("kvlift.cli.doctor.doctor", doctor)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


SLEEPER = """
import sys, tempfile, time
import click
import kvlift.cli.doctor
from kvlift.cli.main import main

@click.command()
def doctor():
    with tempfile.TemporaryDirectory(dir=sys.argv[1]):
        print("sleeping", flush=True)
        # In naps: Python's handler runs between two calls, and a signal that comes just before a
        # long one begins would have to wait for its end.
        for _ in range(600):
            time.sleep(0.1)

kvlift.cli.doctor.doctor = doctor
sys.exit(main(["doctor"]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_cleans_up(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SLEEPER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "sleeping\n"
        assert list(tmp_path.iterdir())
        process.send_signal(number)
        assert process.wait(20) == code
    assert list(tmp_path.iterdir()) == []


SIMULATES = "simulate --seeds 1 --ticks 5 --jobs 1 --repeat-every 0"
STORY = "story tests/stories/a-page-goes-down-once.story"


def called(call: str, streams: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """With the redirections of a shell."""
    command = f"exec {sys.executable} -m kvlift {call} {streams}"
    return subprocess.run(
        ["bash", "-c", command], check=False, text=True, env=ENVIRONMENT, cwd=ROOT, **options
    )


@pytest.mark.parametrize("call", ["--help", "draw --json", STORY, SIMULATES])
def test_a_reader_that_has_gone_is_neither_an_error_nor_a_finding(call: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = called(call, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_stream_that_is_closed_changes_no_exit_code(streams: str) -> None:
    done = called(SIMULATES, streams, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("call", ["--help", "draw --json", STORY, SIMULATES])
def test_output_that_finds_no_room_is_one_line_and_exit_code_2(call: str) -> None:
    done = called(call, ">/dev/full", stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (
        2,
        "kvlift: No space left on device: make room for the output and for temporary files\n",
    )


def test_a_wrong_call_that_nobody_can_be_told_of_is_still_one() -> None:
    assert called("nope", "2>&-").returncode == 2


def test_json_output_is_one_value_whatever_else_prints(capfd: pytest.CaptureFixture[str]) -> None:
    with output.only_the_answer_on_stdout(as_json=True):
        print("a library talks")
        output.say("progress")
    output.print_json({"checks": []})
    said = capfd.readouterr()
    assert json.loads(said.out) == {"checks": []}
    assert said.err == "a library talks\nprogress\n"


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with output.progress_bar() as progress:
        assert progress.disable
    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with output.progress_bar() as progress:
            list(progress.track(range(3), description="pages"))
            time.sleep(0.2)
        assert b"pages" in os.read(controller, 65536)
    os.close(controller)


def test_the_doctor_says_what_works(tmp_path: Path) -> None:
    done = run("doctor", "--json", "--storage", str(tmp_path))
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0, done.stdout
    assert {"torch", "cuda", "pinned memory", "copy bandwidth", "gloo", "storage"} <= set(checks)
    assert all(check["ok"] for check in checks.values() if check["needed"])
    assert "came back equal" in checks["storage"]["detail"]
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_tells_how_to_get_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("kvlift.cli.doctor.EXTRAS", {"demo": ("no_such_package",)})
    folder = tmp_path / "full"
    folder.mkdir()
    monkeypatch.setattr("kvlift.cli.doctor.N_PAGES", 1)
    monkeypatch.setattr("os.urandom", lambda _n: b"short")
    assert main(["doctor", "--json", "--storage", str(folder)]) == 1
    checks = {check["name"]: check for check in json.loads(capfd.readouterr().out)["checks"]}
    assert checks["kvlift[demo]"]["detail"] == "no_such_package missing: pip install 'kvlift[demo]'"
    assert not checks["storage"]["ok"]
