"""How `kvlift serve` starts, what it says of itself, and what is left when it is killed."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import define

from kvlift.cli.main import main
from kvlift.runtime.worker.children import Voices
from kvlift.runtime.worker.preconditions import device_fault, memory_fault
from kvlift.runtime.worker.run_folder import LOCK, PREFIX, RunFolder, remove_leftovers
from kvlift.runtime.worker.settings import WorkerSettings
from tests.real.harm_server import ROOT, serving
from tests.real.harm_world import WAIT_S, is_alive, until
from tests.real.test_bad_input import SECRET, free_port

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


# -- what a newcomer tries ------------------------------------------------------------------------


@define(eq=False)
class Started:
    """A `kvlift serve --json`, and the value that it has printed."""

    process: "subprocess.Popen[str]"
    told: dict[str, Any]

    def answer(self, path: str) -> tuple[int, str]:
        with urllib.request.urlopen(f"{self.told['http']}{path}", timeout=WAIT_S) as reply:
            return reply.status, reply.read().decode()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """A prefill node with an HTTP port."""
    options = ["--role", "prefill", "--prefill-bind", f"tcp://127.0.0.1:{free_port()}", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvlift", "serve", "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "KVLIFT_SECRET": SECRET},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        yield Started(process, json.loads(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_serve_json_says_where_it_listens_as_soon_as_it_does(node: Started) -> None:
    assert node.told["role"] == "prefill"
    assert node.told["pid"] == node.process.pid
    assert node.told["prefill"].startswith("tcp://127.0.0.1:")
    assert node.process.stderr is not None
    ready = node.process.stderr.readline()
    assert ready.split() == ["ready", node.told["prefill"], node.told["http"]]


def test_a_prefill_node_with_a_port_tells_its_health(node: Started) -> None:
    assert node.answer("/health") == (200, "")
    info = json.loads(node.answer("/server_info")[1])
    assert (info["role"], info["prefill"]["requests_held"]) == ("prefill", 0)
    with pytest.raises(urllib.error.HTTPError) as raised:
        body = b'{"input_ids": [1]}'
        urllib.request.urlopen(f"{node.told['http']}/generate", data=body, timeout=WAIT_S)
    with raised.value as refusal:
        assert refusal.code == 503
        assert "no decode worker" in json.loads(refusal.read())["error"]["message"]


def test_ctrl_c_after_the_value_prints_no_second_one(node: Started) -> None:
    """The last one: it ends the node."""
    node.process.send_signal(signal.SIGINT)
    assert node.process.wait(WAIT_S) == 130
    assert node.process.stdout is not None
    assert node.process.stdout.read() == ""


def test_cuda_without_a_device_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["serve", "--port", "0", "--device", "cuda"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "no CUDA device" in line
    assert "kvlift doctor" in line
    assert device_fault(WorkerSettings()) is None


def test_what_all_ranks_say_at_once_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    voices = Voices()
    voices.say("rank 0", "rank 0: OSError: no room")
    voices.say("rank 1", "rank 1: OSError: no room")
    voices.say("rank 1", "rank 1: OSError: something else")
    voices.say("rank 1", "rank 1: OSError: something else")
    voices.say("rank 0", "  a line of a traceback")
    voices.say("rank 1", "  a line of a traceback")
    assert capsys.readouterr().err.splitlines() == [
        "rank 0: OSError: no room",
        "rank 1: the same as rank 0",
        "rank 1: OSError: something else",
        "rank 1: OSError: something else",
        "  a line of a traceback",
        "  a line of a traceback",
    ]


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({}, False),
        ({"host_pages": 900}, False),
        ({"host_pages": 901}, True),
        ({"host_pages": 901, "role": "prefill"}, False),
        ({"host_pages": 1000, "device": "cuda"}, False),
        ({"host_pages": 1001, "device": "cuda"}, True),
    ],
)
def test_tiers_are_refused_where_they_are_larger_than_the_memory(
    changes: dict[str, Any], *, is_refused: bool
) -> None:
    given: dict[str, Any] = {"device_pages": 100, "host_pages": 10, **changes}
    fault = memory_fault(WorkerSettings(**given), 1 << 20, 1000 << 20)
    assert (fault is not None) == is_refused
    if fault is not None:
        assert "--host-pages" in fault
        assert ("--device-pages" in fault) == (changes.get("device") != "cuda")


# -- what a killed launcher leaves ----------------------------------------------------------------


def test_what_a_killed_server_leaves_is_removed_by_the_next_one(tmp_path: Path) -> None:
    lone = ("--ranks", "1", "--role", "decode", "--peer", "tcp://127.0.0.1:1")
    with serving(tmp_path, *lone, secret=SECRET) as server:
        [left] = server.home.glob(f"{PREFIX}*")
        children = server.children()
        assert remove_leftovers(server.home) == 0, "the folder of a living server stays"
        server.process.kill()
        server.process.wait()
        until(lambda: not any(map(is_alive, children)), "its children have ended")
    assert left.is_dir()
    (tmp_path / "tmp" / f"{PREFIX}of-somebody").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    options = ["serve", "--role", "decode", "--peer", "tcp://127.0.0.1:1", "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvlift", *options, "--ranks", "1"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
        env={**environment, "KVLIFT_SECRET": SECRET},
        text=True,
    )
    assert process.stderr is not None
    try:
        assert process.stderr.readline().startswith("ready ")
        assert not left.exists()
        names = sorted(path.name for path in (tmp_path / "tmp").iterdir())
        assert len(names) == 2, "its own, and the one that is nobody's of ours"
        assert f"{PREFIX}of-somebody" in names
    finally:
        process.terminate()
        process.wait()
        process.stderr.close()
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == [f"{PREFIX}of-somebody"]


def test_a_folder_that_is_in_use_or_just_being_made_or_a_link_is_never_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living = RunFolder.made()
    being_made = tmp_path / f"{PREFIX}young"
    being_made.mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / LOCK).touch()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "target")
    dead = tmp_path / f"{PREFIX}dead"
    dead.mkdir()
    (dead / LOCK).touch()
    (dead / "prefill.wire").touch()
    assert remove_leftovers(tmp_path) == 1
    assert not dead.exists()
    assert living.path.exists()
    assert being_made.exists()
    assert (tmp_path / "target" / LOCK).exists()
    another = RunFolder.made()
    assert living.path.exists()
    for each in (another, living, living):
        each.remove()
    assert not living.path.exists()
    assert not another.path.exists()


def test_a_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = os.umask(0)
    try:
        made = RunFolder.made()
    finally:
        os.umask(before)
    assert made.path.stat().st_mode & 0o777 == 0o700
    assert (made.path / LOCK).stat().st_mode & 0o777 == 0o600
    made.remove()
