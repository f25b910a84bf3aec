"""Attacks on a real `kvlift serve`: who means harm gets a sentence, everybody else an answer."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlift.effects import wire
from tests.effects.raw_wire import RawRank
from tests.real.harm_server import ROOT, Server, serving
from tests.real.harm_world import prompt_of, until

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

N_FILES_MAX = 256
READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
ZMTP_GREETING = (
    *(b"\xff", bytes(8), b"\x7f\x03\0", b"NULL".ljust(20, b"\0"), bytes(32)),
    *(b"\x04", bytes([len(READY)]), READY),
)
KNOWN = prompt_of(850, 60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    few_files = ("prlimit", f"--nofile={N_FILES_MAX}:{N_FILES_MAX}")
    with serving(tmp_path_factory.mktemp("attacks"), before=few_files) as server:
        yield server


def answer_known(server: Server, **sampling: Any) -> list[int]:
    how = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True, **sampling}
    answer = server.call("/generate", {"input_ids": list(KNOWN), "sampling_params": how})
    ids: list[int] = answer["output_ids"]
    return ids


@pytest.mark.parametrize(
    "how", [{"top_p": 1e-300}, {"temperature": 1e-300}, {"top_p": 5e-324, "temperature": 100}]
)
def test_no_way_of_sampling_ends_the_worker(server: Server, how: dict[str, float]) -> None:
    greedy = answer_known(server)
    found = answer_known(server, **({"temperature": 1} | how))
    assert found == greedy
    assert answer_known(server) == greedy
    server.ranks_at_rest()


def test_a_body_cannot_make_itself_larger_than_it_is(server: Server) -> None:
    stops = {"max_new_tokens": 1, "stop_token_ids": [1000] * 200_000}
    body = json.dumps({"input_ids": [[1]] * 64, "sampling_params": stops}).encode()
    before = peak_mib(server)
    status, answer = server.answer("/generate", body)
    assert status == 400
    assert "stop_token_ids" in answer["error"]["message"]
    assert all(after - start < 200 for start, after in zip(before, peak_mib(server), strict=True))


def peak_mib(server: Server) -> list[int]:
    peaks = []
    for pid in (server.process.pid, *server.children()):
        status = Path(f"/proc/{pid}/status").read_text()
        [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
        peaks.append(int(line.split()[1]) // 1024)
    return peaks


def test_a_crowd_that_says_nothing_keeps_nobody_from_being_served(server: Server) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    greedy = answer_known(server)
    prefill = server.children()[0]
    with contextlib.ExitStack() as crowd:
        for _ in range(2 * N_FILES_MAX):
            crowd.enter_context(socket.create_connection((host, int(port)), timeout=5))
        os.kill(prefill, signal.SIGKILL)
        until(lambda: is_healthy(server), "served beside the crowd, with a new prefill process")
        assert server.process.poll() is None
    assert answer_known(server) == greedy
    assert len(server.said) < 100, server.said[:100]


def is_healthy(server: Server) -> bool:
    with contextlib.suppress(OSError):
        return server.answer("/health")[0] == 200
    return False


def test_a_crowd_at_the_prefill_port_does_not_end_the_node_nor_those_it_knows() -> None:
    command = ["prlimit", "--nofile=96:96", sys.executable, "-m", "tests.runtime.prefill_process"]
    with (
        subprocess.Popen(
            [*command, "tcp://127.0.0.1:*"], cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as process,
        contextlib.ExitStack() as crowd,
    ):
        crowd.callback(process.kill)
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        host, port = address.removeprefix("tcp://").split(":")
        known = crowd.enter_context(RawRank(address))
        assert isinstance(known.greet(), wire.Welcome)
        for _ in range(150):
            silent = crowd.enter_context(socket.create_connection((host, int(port)), timeout=5))
            silent.sendall(b"".join(ZMTP_GREETING))
        known.hold("known", bytes(16))
        known.want("known", 0, 1, 0)
        assert isinstance(known.hear(10).message, wire.Page)
        assert process.poll() is None
