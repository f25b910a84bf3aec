"""Ctrl-C and SIGTERM, wherever a command happens to be."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvlift.cli.signals import ended_by_signals

COMMAND = """
import sys, time
import click
import kvlift.cli.doctor
from kvlift.cli.main import main

sys.path.insert(0, sys.argv[1])

def nap(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)

@click.command()
def doctor():
{body}

kvlift.cli.doctor.doctor = doctor
sys.exit(main(["doctor"]))
"""

IMPORTS = """
    import forgetful
    print("imported", flush=True)
    nap(30)
"""

FORGETS = """
    try:
        print("trying", flush=True)
        nap(30)
    except BaseException:
        pass
    print("forgotten", flush=True)
    nap(30)
"""

CLEANS = """
    try:
        print("working", flush=True)
        nap(30)
    finally:
        print("cleaning", flush=True)
        try:
            raise OSError
        except OSError:
            nap(0.5)
        print("clean", flush=True)
"""

FORGETFUL = """
import time
try:
    print("importing", flush=True)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        time.sleep(0.01)
except BaseException:
    pass
"""


@contextmanager
def running(body: str, folder: Path) -> Iterator["subprocess.Popen[str]"]:
    script = COMMAND.replace("{body}", body)
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_an_import_that_drops_exceptions_is_heard(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    with running(IMPORTS, tmp_path) as process:
        assert line_of(process) == "importing"
        process.send_signal(number)
        assert process.wait(20) == code


def test_a_signal_that_got_lost_does_not_silence_the_next_one(tmp_path: Path) -> None:
    with running(FORGETS, tmp_path) as process:
        assert line_of(process) == "trying"
        process.send_signal(signal.SIGINT)
        assert line_of(process) == "forgotten"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_cut_the_cleaning_short(
    second: signal.Signals, tmp_path: Path
) -> None:
    with running(CLEANS, tmp_path) as process:
        assert line_of(process) == "working"
        process.send_signal(signal.SIGINT)
        assert line_of(process) == "cleaning"
        process.send_signal(second)
        assert line_of(process) == "clean"
        assert process.wait(20) == 130


def test_the_handlers_of_who_calls_the_command_come_back() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    with ended_by_signals():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
