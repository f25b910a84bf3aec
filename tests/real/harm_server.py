"""`kvlift serve` as a user starts it, and calls as curl makes them."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field

from tests.real.harm_world import PAGE, WAIT_S, until

ROOT = Path(__file__).parents[2]


@define(eq=False)
class Server:
    """A running `kvlift serve`. `home`: its folder for temporary files; `said`: what it wrote to
    standard error; `address`: empty until it is ready."""

    process: "subprocess.Popen[str]"
    home: Path
    address: str = ""
    said: list[str] = field(factory=list)

    def read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if line.startswith("ready "):
                self.address = line.split()[1]

    def call(self, path: str, body: object = None) -> Any:
        """The answer's JSON (or text), which must be a success."""
        status, answer = self.answer(path, None if body is None else json.dumps(body).encode())
        assert status == 200, answer
        return answer

    def answer(self, path: str, data: bytes | None = None) -> tuple[int, Any]:
        """Status, and the JSON or text of whatever comes back."""
        request = urllib.request.Request(f"{self.address}{path}", data=data)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
                status, raw = reply.status, reply.read()
        except urllib.error.HTTPError as error:
            with error:
                status, raw = error.code, error.read()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode()

    def children(self) -> list[int]:
        pid = self.process.pid
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]

    def ranks_at_rest(self) -> list[dict[str, Any]]:
        """The ranks' statistics once nothing is under way: and then nothing is held, either."""
        info: dict[str, Any] = {}

        def is_quiet() -> bool:
            info.update(self.call("/server_info"))
            prefill = info["prefill"]
            return info["requests_live"] == prefill["requests_held"] == prefill[
                "requests_queued"
            ] == 0 and all(rank["leaks"] is not None for rank in info["ranks"])

        until(is_quiet, "the server at rest")
        ranks: list[dict[str, Any]] = info["ranks"]
        for rank in ranks:
            assert (rank["leaks"], rank["requests_live"]) == (0, 0)
            assert (rank["n_tickets"], rank["n_pins"]) == (0, 0)
            for tier in ("device", "host"):
                assert rank[tier]["free"] + rank[tier]["cached"] == info[f"{tier}_pages"]
        return ranks


@contextlib.contextmanager
def serving(
    home: Path, *options: str, secret: str = "", before: Sequence[str] = ()
) -> Iterator[Server]:
    """Two ranks and a prefill process of the tiny model, ready; killed at the end if need be.

    `before`: a command that becomes the one that follows it, such as `prlimit`."""
    temporary = home / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "kvlift", "serve", "--port", "0", "--page-tokens", str(PAGE)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    if secret:
        environment["KVLIFT_SECRET"] = secret
    process = subprocess.Popen(
        [*before, *command, "--storage", str(home / "kv"), *options],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    server = Server(process, temporary)
    reader = threading.Thread(target=server.read)
    reader.start()
    try:
        until(lambda: bool(server.address) or process.poll() is not None, "ready or over")
        assert server.address, f"it ended before it was ready: {server.said}"
        yield server
    finally:
        process.kill()
        process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


def refused(*options: str, secret: str = "") -> tuple[int, str]:
    """Exit code and standard error of a `kvlift` command that is expected to end at once."""
    environment = {key: text for key, text in os.environ.items() if key != "KVLIFT_SECRET"}
    if secret:
        environment["KVLIFT_SECRET"] = secret
    ended = subprocess.run(
        [sys.executable, "-m", "kvlift", *options],
        capture_output=True,
        check=False,
        cwd=ROOT,
        env=environment,
        text=True,
        timeout=WAIT_S,
    )
    assert not ended.stdout
    return ended.returncode, ended.stderr
