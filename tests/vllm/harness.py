"""Real vLLM servers for tests and benches: start, wait until ready, look inside, end.

The servers run in an environment of their own, KVLIFT_VLLM_VENV (default: `.vllm-venv` in or beside
this repository); whoever uses this module needs httpx only. Everything a server says goes into a
log file, and a server that dies is an error that quotes its last lines.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import attrs
import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT: Final = Path(__file__).resolve().parent.parent.parent
INSIDE: Final = Path(__file__).resolve().parent / "inside"

GENTLE: Final = {"KVLIFT_YIELD_US": "200"}
"""With tensor parallelism: see `inside/sitecustomize.py`."""

START_S: Final = 600.0
"""A server needs 20 to 60 s on two quiet cores; here may be others."""

BLOCK_TOKENS: Final = 128
"""vLLM's block on the CPU."""


def vllm_python() -> Path | None:
    """The interpreter of vLLM's environment, None where there is none."""
    named = os.environ.get("KVLIFT_VLLM_VENV")
    folders = [Path(named)] if named else [ROOT / ".vllm-venv", ROOT.parent / ".vllm-venv"]
    found = (folder / "bin" / "python" for folder in folders)
    return next((path for path in found if path.exists()), None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Small, offline and quiet; two servers must fit on two cores."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return kept | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{INSIDE}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "UCX_TLS": "tcp,self,sm",
        **more,
    }


def _ends_with_us() -> tuple[str, ...]:
    """A server outlives nobody: a test run that is killed leaves no gigabytes behind."""
    setpriv = shutil.which("setpriv")
    return (setpriv, "--pdeathsig", "TERM", "--") if setpriv else ()


@attrs.define
class Process:
    """A server process in a session of its own, with its log."""

    name: str
    command: Sequence[str]
    port: int
    log: Path
    env: Mapping[str, str] = attrs.field(factory=dict)
    started_at: float = 0.0
    _child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start and return at once; `wait_ready` waits."""
        self.started_at = time.monotonic()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                [*_ends_with_us(), *self.command],
                env=environment(self.env),
                cwd=self.log.parent,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self

    def wait_ready(self, timeout_s: float = START_S) -> Self:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.check()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return self
            time.sleep(0.2)
        raise TimeoutError(f"{self.name} is not ready after {timeout_s:.0f} s:\n{self.tail()}")

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def send(self, sign: signal.Signals) -> None:
        """To every process of its session, as with SIGSTOP and SIGCONT."""
        if self._child is not None:
            os.killpg(self._child.pid, sign)

    def check(self) -> None:
        if not self.is_running:
            raise RuntimeError(f"{self.name} has ended:\n{self.tail()}")

    def tail(self, n_lines: int = 30) -> str:
        return "\n".join(self.text().splitlines()[-n_lines:])

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def stop(self, timeout_s: float = 20.0) -> None:
        """SIGTERM, and SIGKILL for whatever of its session is left."""
        child = self._child
        if child is None:
            return
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole session: no goodbye to anyone."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait(20)
            self._child = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


_ITERATION: Final = re.compile(
    r"Iteration\(\d+\): \d+ context requests, (\d+) context tokens, (\d+) generation requests,"
    r" \d+ generation tokens, iteration elapsed time: ([\d.]+) ms"
)


@attrs.frozen
class Step:
    """One step of an engine, in its own words."""

    n_prompt_tokens: int
    n_decoding: int
    ms: float


_HELD: Final = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)


@attrs.define
class Server(Process):
    """One vLLM instance behind OpenAI's API."""

    def counters(self) -> dict[str, float]:
        """`/metrics` by name and labels (`name{label="value"}`, without engine and model_name)."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = [
                    f'{name}="{value}"'
                    for name, value in sorted(sample.labels.items())
                    if name not in {"engine", "model_name"}
                ]
                key = sample.name + (f"{{{','.join(labels)}}}" if labels else "")
                found[key] = found.get(key, 0.0) + sample.value
        return found

    def counter(self, name: str) -> float:
        return self.counters().get(name, 0.0)

    def reset_prefix_cache(self, timeout_s: float = 30.0) -> None:
        """Forget the device's prefix cache; waits until nothing holds a block."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            answer = httpx.post(f"{self.url}/reset_prefix_cache", timeout=30)
            if answer.status_code == 200 and answer.json()["success"]:
                return
            time.sleep(0.1)
        raise TimeoutError(f"{self.name} still holds blocks after {timeout_s:.0f} s")

    def call(self, method: str, *args: str) -> list[Any]:
        """A method of KvProbe on every worker."""
        asked = {"method": method, "args": list(args)}
        answer = httpx.post(f"{self.url}/collective_rpc", json=asked, timeout=120)
        answer.raise_for_status()
        found: list[Any] = answer.json()["results"]
        return found

    def blocks(self, rank: int = 0) -> dict[str, str]:
        """Digest by block id of everything that lies in this rank's KV memory."""
        found: dict[str, str] = self.call("probe_blocks")[rank]
        return found

    def steps(self) -> list[Step]:
        """All steps of the engine so far, from its log."""
        rows = _ITERATION.findall(self.text())
        return [Step(int(tokens), int(decoding), float(ms)) for tokens, decoding, ms in rows]

    def step_times_ms(self) -> list[float]:
        """Steps that decoded and computed no prompt."""
        return [it.ms for it in self.steps() if it.n_decoding and not it.n_prompt_tokens]

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        """Until no request is there and no block is held; what stays for that long has leaked."""
        deadline = time.monotonic() + timeout_s
        held: dict[str, float] = {}
        while time.monotonic() < deadline:
            counters = self.counters()
            held = {name: counters.get(name, 0.0) for name in _HELD if counters.get(name)}
            if not held:
                return self.reset_prefix_cache(max(1.0, deadline - time.monotonic()))
            time.sleep(0.2)
        raise TimeoutError(f"{self.name} still holds {held} after {timeout_s:.0f} s")


@attrs.frozen
class Sizes:
    """What all servers of one comparison have in common."""

    model: Path
    max_len: int = 4096
    n_blocks: int | None = None
    """Blocks of the device; None: as many as fit into VLLM_CPU_KVCACHE_SPACE."""
    n_ranks: int = 1
    more: tuple[str, ...] = ()


def server(
    name: str,
    sizes: Sizes,
    folder: Path,
    transfer: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
) -> Server:
    """Not started yet. `transfer`: the object of `--kv-transfer-config`."""
    python = vllm_python()
    if python is None:
        raise RuntimeError("there is no environment with vLLM: make test-vllm makes one")
    port = free_port()
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(sizes.model), "--served-model-name", "model", "--skip-tokenizer-init"),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--dtype", "float32"),
        *("--seed", "0", "--max-model-len", str(sizes.max_len), "--max-logprobs", "64"),
        *("--enable-prompt-tokens-details", "--enable-logging-iteration-details"),
        *("--worker-extension-cls", "kv_probe.KvProbe"),
        *("--tensor-parallel-size", str(sizes.n_ranks)),
        *sizes.more,
    ]
    if sizes.n_blocks is not None:
        command += ["--num-gpu-blocks-override", str(sizes.n_blocks)]
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    env = {**(GENTLE if sizes.n_ranks > 1 else {}), **(env or {})}
    return Server(name=name, command=command, port=port, log=folder / f"{name}.log", env=env)


def _leave(number: int, _frame: object) -> None:
    """A run that is told to end unwinds, and so ends its servers."""
    sys.exit(128 + number)


@contextlib.contextmanager
def running(*processes: Process) -> Iterator[None]:
    """Start all of them, wait for all, end all: what is left at the end is killed."""
    signal.signal(signal.SIGTERM, _leave)
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.enter_context(process.start())
        for process in processes:
            process.wait_ready()
        yield
