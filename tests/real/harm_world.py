"""A cluster that tests may hurt, and how they tell that it is whole again."""

import contextlib
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from attrs import define, field

from kvlift.runtime.worker.gathering import Generation
from kvlift.runtime.worker.generation import Finish, FinishKind, Request, Sampling
from kvlift.runtime.worker.launch import Cluster
from kvlift.runtime.worker.loading import ModelSource
from kvlift.runtime.worker.model import Decoder
from kvlift.runtime.worker.settings import WorkerSettings

PAGE = 8
WAIT_S = 90.0
LOGPROB_DIFF_MAX = 1e-4


def prompt_of(seed: int, n_tokens: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(1024) for _ in range(n_tokens))


def request_of(rid: str, prompt: tuple[int, ...], n_new_tokens: int) -> Request:
    """A greedy one of exactly `n_new_tokens`."""
    sampling = Sampling(max_new_tokens=n_new_tokens, temperature=0.0, ignore_eos=True)
    return Request(rid=rid, tokens=prompt, sampling=sampling)


def settings_of(storage: Path, **fields: Any) -> WorkerSettings:
    given: dict[str, Any] = {
        "page_tokens": PAGE,
        "device_pages": 512,
        "host_pages": 512,
        "storage_folder": str(storage),
        "ballot_deadline_s": 4.0,
        "peer_dead_s": 3.0,
        # These tests ask whether storage is used, not whether it is worth it on a busy machine.
        "driver": {"cost_model": "off"},
    }
    return WorkerSettings(**given | fields)


def whole_decoder() -> Decoder:
    """The unsharded model for `assert_as_plain`."""
    torch.set_num_threads(1)
    return ModelSource().decoder()


def assert_as_plain(decoder: Decoder, prompt: Sequence[int], generation: Generation) -> None:
    """The whole answer came, each token is the likeliest after those before it by one plain
    forward, and so are the log-probabilities."""
    assert generation.finish.kind is FinishKind.LENGTH, generation.finish
    tokens = list(generation.tokens)
    logits, _ = decoder.plain_forward(torch.tensor([*prompt, *tokens]))
    told = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    assert told.argmax(dim=-1).tolist() == tokens, generation.rid
    wanted = [float(told[place, token]) for place, token in enumerate(tokens)]
    assert list(generation.logprobs) == pytest.approx(wanted, abs=LOGPROB_DIFF_MAX)


def likeliest(decoder: Decoder, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The likeliest token in the place of each of `tokens`, given those before it."""
    logits, _ = decoder.plain_forward(torch.tensor([*prompt, *tokens]))
    return cast("list[int]", logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist())


def until(holds: Callable[[], bool], what: str, within_s: float = WAIT_S) -> float:
    """Wait until it holds; the seconds that took."""
    started_s = time.monotonic()
    while not holds():
        assert time.monotonic() - started_s < within_s, f"in {within_s:g} s never: {what}"
        time.sleep(0.02)
    return time.monotonic() - started_s


def run(cluster: Cluster, rid: str, prompt: tuple[int, ...], n_new_tokens: int = 4) -> Generation:
    return cluster.submit(request_of(rid, prompt, n_new_tokens)).result(WAIT_S)


def rank_stats(cluster: Cluster) -> list[dict[str, Any]]:
    """Of the decode ranks, whether or not a prefill process is there."""
    return cast("list[dict[str, Any]]", cluster.run(cluster.engine.rank_stats()))


def ranks_at_rest(cluster: Cluster) -> list[dict[str, Any]]:
    """The ranks' statistics once nothing is under way: and then nothing is held, either."""
    seen: list[dict[str, Any]] = []

    def is_quiet() -> bool:
        seen[:] = rank_stats(cluster)
        return all(rank["leaks"] is not None for rank in seen)

    until(is_quiet, "the ranks at rest")
    sizes = {"device": cluster.settings.device_pages, "host": cluster.settings.host_pages}
    for rank in seen:
        assert (rank["leaks"], rank["requests_live"]) == (0, 0)
        assert (rank["n_tickets"], rank["n_pins"]) == (0, 0)
        for tier, n_pages in sizes.items():
            assert rank[tier]["free"] + rank[tier]["cached"] == n_pages, (tier, rank)
    return seen


def prefill_at_rest(cluster: Cluster) -> dict[str, Any]:
    """The prefill process's statistics once it keeps nothing for anybody."""
    seen: dict[str, Any] = {}

    def is_quiet() -> bool:
        seen.update(cluster.stats()["prefill"])
        return (seen["requests_held"], seen["requests_queued"]) == (0, 0)

    until(is_quiet, "the prefill process at rest")
    return seen


@define(eq=False)
class Running:
    """A request whose answer can be seen growing."""

    tokens: list[int] = field(factory=list)
    has_started: threading.Event = field(factory=threading.Event)
    finish: "Future[Finish]" = field(init=False)

    @classmethod
    def started(cls, cluster: Cluster, request: Request) -> "Running":
        """Returns with the first token."""
        running = cls()

        async def follow() -> Finish:
            last: Finish | None = None
            async for output in cluster.engine.submit(request):
                running.tokens.extend(output.tokens)
                running.has_started.set()
                last = output.finish
            assert last is not None
            return last

        running.finish = cluster.start(follow())
        assert running.has_started.wait(WAIT_S)
        return running


def abort(cluster: Cluster, rid: str) -> bool:
    return cluster.run(cluster.engine.abort(rid))


def pids_of(cluster: Cluster) -> list[int]:
    return [child.pid for child in cluster.ranks]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def small_disk(folder: Path, size_mib: int) -> Iterator[Path]:
    """A file system of its own in `folder`, where this user may mount one; else skips the test."""
    folder.mkdir(parents=True)
    options = f"size={size_mib}m,mode=0700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        capture_output=True,
        check=False,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"no small disk: {mounted.stderr.strip() or 'mount is not allowed here'}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
