"""Faults between real processes, for pairs of any number of ranks: what is done, what must hold.

Each function plays one fault against a pair and compares its answers with those of the reference.
The tests say for which pair, and look for leaks afterwards.
"""

import hashlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx

from examples.vllm_proxy import prefill_body
from tests.vllm.harness import BLOCK_TOKENS, Server
from tests.vllm.harness_client import TOLERANCE, Answer, Client, Script, difference
from tests.vllm.harness_model import TINY
from tests.vllm.harness_pairs import Pair, wait_written

Reference = Callable[[Script], list[Answer]]

BLOCK_BYTES: Final = TINY.kv_bytes(BLOCK_TOKENS)
"""Of all ranks together."""

RECEIVED: Final = "vllm:kvlift_bytes_received_total"
FROM_STORAGE: Final = 'vllm:kvlift_pages_restored_total{tier="storage"}'
SHORT: Final = "vllm:kvlift_loads_short_total"
PREEMPTED: Final = "vllm:num_preemptions_total"

WRITTEN_S: Final = 60.0

HEADER_BYTES: Final = 4096
"""In front of the page in a file of the storage tier."""


def worst(answers: Sequence[Answer], expected: Sequence[Answer]) -> float:
    return max(difference(*both) for both in zip(answers, expected, strict=True))


def no_block_is_held(pair: Pair, timeout_s: float = 60.0) -> None:
    """Both block pools are back to their sizes. Forgets the prefix caches, too."""
    for server in (pair.prefill, pair.decode):
        if server.is_running:
            server.check()
            server.wait_idle(timeout_s)


def kept_by(prefill: Server, prompt: Sequence[int]) -> dict[str, Any]:
    """What the proxy asks of the prefill instance, and what it says."""
    body = prefill_body({"model": "model", "prompt": list(prompt), "temperature": 0})
    answer = httpx.post(f"{prefill.url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()["kv_transfer_params"]
    assert found["do_remote_prefill"], "the prefill instance keeps the blocks of this request"
    return found


def decoded(decode: Server, script: Script, params: dict[str, Any]) -> Answer:
    client = Client(decode.url, timeout_s=180)
    return client.complete(script.turns[0], script.n_answer, kv_transfer_params=params)


@contextmanager
def frozen(server: Server) -> Iterator[None]:
    """Its processes are stopped: it has promised, and says nothing."""
    server.send(signal.SIGSTOP)
    try:
        yield
    finally:
        server.send(signal.SIGCONT)


@contextmanager
def frozen_rank(server: Server, rank: int) -> Iterator[None]:
    """One worker is stopped, the others go on."""
    pid = server.call("probe_pid")[rank]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# -- storage -----------------------------------------------------------------------------------


def storage_of(pair: Pair) -> Path:
    return pair.decode.log.parent / "kv"


def pages_in(folder: Path, n_bytes: int) -> list[Path]:
    """Files of that many bytes and a header, the oldest first."""
    size = n_bytes + HEADER_BYTES
    found = []
    for path in folder.rglob("*.page"):
        with suppress(FileNotFoundError):
            facts = path.stat()
            found += [(facts.st_mtime_ns, path)] if facts.st_size == size else []
    return [path for _at, path in sorted(found)]


def pages_of_rank(decode: Server, rank: int, pages: Iterable[Path]) -> list[Path]:
    """Those whose bytes lie in this rank's blocks on the device, too."""
    digests = set(decode.blocks(rank).values())
    return [path for path in pages if _digest(path) in digests]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()[HEADER_BYTES:]).hexdigest()


def damage(path: Path) -> None:
    """One bit in the middle of the page."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def written(
    pair: Pair, script: Script, turn: int, reference: Reference, n_pages: int, n_ranks: int
) -> list[list[Path]]:
    """Play one turn; by rank, the files of the `n_pages` full blocks that are new with it."""
    expected, n_bytes = reference(script), BLOCK_BYTES // n_ranks
    before = set(pages_in(storage_of(pair), n_bytes))
    client = Client(pair.proxy.url)
    answer = client.complete(script.prompt(turn, expected), script.n_answer)
    assert difference(answer, expected[turn]) < TOLERANCE
    deadline = time.monotonic() + WRITTEN_S
    while True:
        new = [path for path in pages_in(storage_of(pair), n_bytes) if path not in before]
        by_rank = [pages_of_rank(pair.decode, rank, new) for rank in range(n_ranks)]
        if all(len(mine) == n_pages for mine in by_rank):
            return by_rank
        counts = [len(mine) for mine in by_rank]
        if time.monotonic() > deadline:
            raise TimeoutError(f"{n_pages} pages of each rank should be in storage, {counts} are")
        time.sleep(0.5)


def pushed_out_of_host(pair: Pair, seeds: Iterable[int]) -> None:
    """Other prompts go through a small host tier; the device forgets everything."""
    for seed in seeds:
        Client(pair.decode.url).complete(Script.drawn(seed, n_first=1900).turns[0], 1)
    pair.decode.wait_idle()
    wait_written(storage_of(pair))


def vanished(pair: Pair) -> None:
    shutil.rmtree(storage_of(pair))


# -- prefill, aborts, preemption -----------------------------------------------------------------


def abort_during_a_load(pair: Pair, script: Script, reference: Reference) -> None:
    prompt = script.prompt(0, [])
    params = kept_by(pair.prefill, prompt)
    body = {"model": "model", "prompt": prompt, "max_tokens": 4, "kv_transfer_params": params}
    with frozen(pair.prefill):
        try:
            httpx.post(f"{pair.decode.url}/v1/completions", json=body, timeout=1.5)
        except httpx.ReadTimeout:
            time.sleep(1)  # the server notices the client's leave
        else:
            raise AssertionError("it answered while the prefill instance was silent")
    pair.decode.wait_idle()
    again = Client(pair.proxy.url, timeout_s=180).complete(prompt, script.n_answer)
    assert difference(again, reference(script)[0]) < TOLERANCE


def preemption(pair: Pair, scripts: Sequence[Script], reference: Reference) -> None:
    """Their prompts are there, so that all begin at once; what they generate does not fit."""
    expected = [reference(script)[0] for script in scripts]
    before = pair.decode.counter(PREEMPTED)
    kept = [kept_by(pair.prefill, script.turns[0]) for script in scripts]
    with ThreadPoolExecutor(len(scripts)) as threads:
        asked = [
            threads.submit(decoded, pair.decode, script, params)
            for script, params in zip(scripts, kept, strict=True)
        ]
        answers = [one.result() for one in asked]
    assert pair.decode.counter(PREEMPTED) > before, "the cache was full"
    assert worst(answers, expected) < TOLERANCE


def silence(
    pair: Pair, script: Script, reference: Reference, rank: int | None = None, *, for_s: float = 1.5
) -> None:
    """Prefill, or one rank of it, says nothing for a moment after its promise."""
    params = kept_by(pair.prefill, script.turns[0])
    stopped = frozen(pair.prefill) if rank is None else frozen_rank(pair.prefill, rank)
    with ThreadPoolExecutor(1) as thread:
        with stopped:
            late = thread.submit(decoded, pair.decode, script, params)
            time.sleep(for_s)
        assert difference(late.result(), reference(script)[0]) < TOLERANCE


def death_after_the_promise(pair: Pair, script: Script, reference: Reference) -> None:
    """Frozen first, so that nothing has been sent. There is no prefill instance afterwards."""
    params = kept_by(pair.prefill, script.turns[0])
    with ThreadPoolExecutor(1) as thread:
        pair.prefill.send(signal.SIGSTOP)
        late = thread.submit(decoded, pair.decode, script, params)
        time.sleep(1.0)
        pair.prefill.kill()
        assert difference(late.result(), reference(script)[0]) < TOLERANCE


def life_without_prefill(pair: Pair, script: Script, reference: Reference) -> None:
    assert not pair.prefill.is_running
    expected = reference(script)
    answers = script.play(Client(pair.proxy.url), expected)
    assert worst(answers, expected) < TOLERANCE
