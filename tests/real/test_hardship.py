"""A slow disk, clocks that jump, processes that stand still, memory that runs out.

Each is real: strace holds the system calls up, a preloaded library and time namespaces move the
clocks, signals stop processes, the kernel refuses memory.
"""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from attrs import define

from kvlift.runtime.worker.gathering import Generation
from kvlift.runtime.worker.generation import EngineDownError, FinishKind
from kvlift.runtime.worker.launch import Cluster
from kvlift.runtime.worker.layouts import whole_layout
from kvlift.runtime.worker.model import Decoder
from kvlift.runtime.worker.model_config import tiny
from kvlift.runtime.worker.preconditions import memory_bytes
from tests.real.harm_server import ROOT, refused
from tests.real.harm_world import (
    PAGE,
    WAIT_S,
    Running,
    assert_as_plain,
    is_alive,
    likeliest,
    pids_of,
    prefill_at_rest,
    prompt_of,
    ranks_at_rest,
    request_of,
    settings_of,
    until,
    whole_decoder,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

STORED = [prompt_of(seed, 160) for seed in range(700, 703)]
DELAY_S = 0.2
STILL_S = 6.0
"""Longer than every deadline below it: of ballots 4 s, of a silent peer 3 s."""

DAY_S = 86_400


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return whole_decoder()


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(settings_of(tmp_path_factory.mktemp("hardship") / "kv")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    if shared_cluster.died.is_set():
        shared_cluster.restart_decode()
    yield shared_cluster
    if not shared_cluster.died.is_set():
        ranks_at_rest(shared_cluster)
        prefill_at_rest(shared_cluster)


def play(cluster: Cluster, name: str, prompts: Sequence[tuple[int, ...]]) -> list[Generation]:
    return cluster.generate(
        [request_of(f"{name}-{index}", prompt, 4) for index, prompt in enumerate(prompts)]
    )


def assert_unharmed(
    cluster: Cluster, decoder: Decoder, name: str, prompts: Sequence[tuple[int, ...]]
) -> list[Generation]:
    generations = play(cluster, name, prompts)
    for prompt, generation in zip(prompts, generations, strict=True):
        assert_as_plain(decoder, prompt, generation)
    ranks_at_rest(cluster)
    return generations


def store_prompts(cluster: Cluster) -> None:
    """All of STORED are on storage, and there only."""
    play(cluster, "store", STORED)
    ranks_at_rest(cluster)
    cluster.flush(["device", "host"])


# -- a slow disk ----------------------------------------------------------------------------------


@contextlib.contextmanager
def slow_calls(pids: Sequence[int], calls: str, delay_s: float) -> Iterator[None]:
    """Every such system call of these processes begins later; skips where that is not allowed."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("no slow disk: the command `strace` is missing")
    inject = f"inject={calls}:delay_enter={int(delay_s * 1e6)}"
    watched = [part for pid in pids for part in ("-p", str(pid))]
    held = subprocess.Popen(
        [strace, "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}", "-e", inject, *watched],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: held.poll() is not None or all(map(is_traced, pids)), "strace holds them")
        if held.poll() is not None:
            assert held.stderr is not None
            pytest.skip(f"no slow disk: {held.stderr.read().strip()[:200]}")
        yield
    finally:
        held.terminate()
        held.wait(WAIT_S)
        assert held.stderr is not None
        held.stderr.close()
    until(lambda: not any(map(is_traced, pids)), "strace has let go")


def is_traced(pid: int) -> bool:
    """Whether all threads of a process are."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return all("\nTracerPid:\t0\n" not in text for text in texts)


def test_a_slow_disk_holds_up_what_reads_from_it_and_nobody_else(
    cluster: Cluster, decoder: Decoder
) -> None:
    store_prompts(cluster)
    fresh = [prompt_of(seed, 60) for seed in range(710, 713)]
    with slow_calls(pids_of(cluster), "preadv,preadv2", DELAY_S):
        started_s = time.monotonic()
        slow = cluster.submit(request_of("slow", STORED[0], 4))
        for prompt, generation in zip(fresh, play(cluster, "fresh", fresh), strict=True):
            assert_as_plain(decoder, prompt, generation)
        assert not slow.done(), "the others have ended while its pages are still being read"
        generation = slow.result(WAIT_S)
        took_s = time.monotonic() - started_s
        assert_as_plain(decoder, STORED[0], generation)
    assert generation.cached.storage == len(STORED[0])
    assert took_s > DELAY_S * len(STORED[0]) / PAGE / 2, "two threads read, each page was held up"
    ranks_at_rest(cluster)


def test_a_disk_that_is_slow_to_write_delays_no_answer_and_an_abort_of_a_slow_read_none_either(
    cluster: Cluster, decoder: Decoder
) -> None:
    store_prompts(cluster)
    with slow_calls(pids_of(cluster), "preadv,preadv2,pwritev,pwritev2", DELAY_S):
        reading = cluster.submit(request_of("reading", STORED[1], 4))
        time.sleep(3 * DELAY_S)
        assert cluster.run(cluster.engine.abort("reading"))
        started_s = time.monotonic()
        assert reading.result(WAIT_S).finish.kind is FinishKind.ABORT
        prompt = prompt_of(720, 160)
        [generation] = play(cluster, "written", [prompt])
        assert_as_plain(decoder, prompt, generation)
        # 20 pages are being written by two threads, for 2 s at least.
        assert time.monotonic() - started_s < DELAY_S * len(prompt) / PAGE
    assert_unharmed(cluster, decoder, "quick-again", [*STORED, prompt])


# -- processes that stand still -------------------------------------------------------------------


def test_a_whole_worker_that_was_suspended_goes_on_where_it_was(
    cluster: Cluster, decoder: Decoder
) -> None:
    """As a laptop lid or a moved virtual machine does it: all processes at once, for long."""
    assert cluster.prefill is not None
    short, long = prompt_of(730, 40), prompt_of(731, 1200)
    decoding = Running.started(cluster, request_of("decoding", short, 300))
    filling = cluster.submit(request_of("filling", long, 4))
    pids = [*pids_of(cluster), cluster.prefill.pid]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(STILL_S)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert decoding.finish.result(WAIT_S).kind is FinishKind.LENGTH
    assert likeliest(decoder, short, decoding.tokens) == decoding.tokens
    assert_as_plain(decoder, long, filling.result(WAIT_S))
    assert not cluster.died.is_set()
    assert_unharmed(cluster, decoder, "after-sleep", STORED)


# -- memory ---------------------------------------------------------------------------------------


def test_tiers_that_are_larger_than_the_memory_are_one_sentence_at_the_start() -> None:
    options = ("serve", "--port", "0", "--host-pages", str(1 << 24), "--page-tokens", "4096")
    started_s = time.monotonic()
    code, told = refused(*options)
    assert time.monotonic() - started_s < WAIT_S / 3, "no process has been started for it"
    [line] = told.splitlines()
    assert code == 2
    assert line.startswith("kvlift: ")
    assert "GiB of memory" in line
    assert "--host-pages" in line


def test_memory_that_the_kernel_refuses_is_a_sentence_of_the_rank() -> None:
    """It would fit into this machine, but not into what a rank may have."""
    page_bytes = whole_layout(tiny(), 4096).page_bytes
    n_pages = memory_bytes() * 3 // 4 // page_bytes
    limit = ["prlimit", f"--as={memory_bytes() // 2}", sys.executable, "-m", "kvlift", "serve"]
    sizes = ["--page-tokens", "4096", "--device-pages", "8", "--host-pages", str(n_pages)]
    ended = subprocess.run(
        [*limit, "--port", "0", "--ranks", "1", *sizes],
        capture_output=True,
        check=False,
        cwd=ROOT,
        text=True,
        timeout=WAIT_S,
    )
    last = ended.stderr.splitlines()[-1]
    assert ended.returncode == 2, ended.stderr
    assert last.startswith("kvlift: the decode worker is down: rank 0: ")
    assert f"no memory for {n_pages} host pages" in last
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("victim", "more_bytes"), [(0, 1 << 20), (1, 48 << 20)])
def test_a_rank_that_gets_no_more_memory_gives_right_answers_or_none(
    cluster: Cluster, decoder: Decoder, victim: int, more_bytes: int
) -> None:
    assert_unharmed(cluster, decoder, f"before-{victim}", STORED)
    pids = pids_of(cluster)
    now_bytes = int(Path(f"/proc/{pids[victim]}/statm").read_text().split()[0]) * 4096
    resource.prlimit(pids[victim], resource.RLIMIT_AS, (now_bytes + more_bytes, now_bytes * 8))
    prompts = [prompt_of(740 + index, 900) for index in range(12)]
    futures = [
        cluster.submit(request_of(f"tight-{victim}-{index}", prompt, 40))
        for index, prompt in enumerate(prompts)
    ]
    n_right = n_failed = 0
    for prompt, future in zip(prompts, futures, strict=True):
        try:
            generation = future.result(WAIT_S)
        except EngineDownError:
            n_failed += 1
            continue
        if generation.finish.kind is FinishKind.ERROR:
            n_failed += 1
            continue
        assert_as_plain(decoder, prompt, generation)
        n_right += 1
    assert n_right + n_failed == len(prompts)
    if cluster.died.is_set():
        refusals = ("memory", "alloc", "new thread", "MemoryError", "SIGABRT", "SIGSEGV")
        assert any(word in cluster.fault for word in refusals), cluster.fault
        assert f"rank {victim}" in cluster.fault, cluster.fault
        cluster.restart_decode()
        assert not any(map(is_alive, pids))
    else:
        assert n_failed == 0
        resource.prlimit(pids[victim], resource.RLIMIT_AS, (now_bytes * 8, now_bytes * 8))
    assert_unharmed(cluster, decoder, f"after-{victim}", [*STORED, *prompts[:2]])


# -- clocks ---------------------------------------------------------------------------------------


@define(eq=False)
class Hand:
    """Moves the wall clock of every process that was started with it."""

    library: Path
    file: Path

    def put(self, days: int) -> None:
        with self.file.open("r+b") as file:
            file.write((days * DAY_S).to_bytes(8, "little", signed=True))


@pytest.fixture
def hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hand:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no clock can jump: there is no C compiler")
    made = Hand(tmp_path / "wall_clock.so", tmp_path / "hand")
    made.file.write_bytes(bytes(8))
    source = Path(__file__).with_name("wall_clock.c")
    options = ["-O2", "-shared", "-fPIC", "-o", str(made.library), str(source), "-ldl"]
    built = subprocess.run([compiler, *options], capture_output=True, check=False, text=True)
    if built.returncode:
        pytest.skip(f"no clock can jump: {built.stderr.strip()[:200]}")
    monkeypatch.setenv("LD_PRELOAD", str(made.library))
    monkeypatch.setenv("KVLIFT_TEST_CLOCK", str(made.file))
    return made


def test_a_wall_clock_that_jumps_by_years_changes_nothing(
    tmp_path: Path, decoder: Decoder, hand: Hand
) -> None:
    with Cluster(settings_of(tmp_path / "kv")) as cluster:
        assert str(hand.library) in Path(f"/proc/{pids_of(cluster)[0]}/maps").read_text()
        hand.put(3650)
        told = subprocess.run(
            [sys.executable, "-c", "import time; print(time.time())"],
            capture_output=True,
            check=True,
            text=True,
        )
        assert 3649 * DAY_S < float(told.stdout) - time.time() < 3651 * DAY_S
        hand.put(0)
        store_prompts(cluster)
        short = prompt_of(750, 40)
        decoding = Running.started(cluster, request_of("jumping", short, 600))
        for days in (3650, -3650, 20, -1, 0):
            hand.put(days)
            name = f"at{days}"
            found = assert_unharmed_beside(cluster, decoder, name, [*STORED, prompt_of(751, 90)])
            assert sum(each.cached.total for each in found) >= 3 * len(STORED[0])
        assert decoding.finish.result(WAIT_S).kind is FinishKind.LENGTH
        assert likeliest(decoder, short, decoding.tokens) == decoding.tokens
        ranks_at_rest(cluster)
        prefill_at_rest(cluster)


def assert_unharmed_beside(
    cluster: Cluster, decoder: Decoder, name: str, prompts: Sequence[tuple[int, ...]]
) -> list[Generation]:
    """The same while others are running."""
    generations = play(cluster, name, prompts)
    for prompt, generation in zip(prompts, generations, strict=True):
        assert_as_plain(decoder, prompt, generation)
    return generations


def test_ranks_and_nodes_whose_monotonic_clocks_differ_by_days_agree(
    tmp_path: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process gets a time namespace of its own; none may read another's clock."""
    probe = ["unshare", "--time", "--monotonic", "864000", "--fork", "true"]
    probed = subprocess.run(probe, capture_output=True, check=False, text=True)
    if probed.returncode:
        pytest.skip(f"no clock of its own: {probed.stderr.strip()[:200]}")
    counter = tmp_path / "count"
    counter.write_text("")
    wrapper = tmp_path / "python"
    wrapper.write_text(
        "#!/bin/sh\n"
        f'echo x >> "{counter}"\n'
        f'days=$(wc -l < "{counter}")\n'
        "exec unshare --time --monotonic $((days * 864000)) --boottime $((days * 864000)) "
        f'--fork --kill-child "{sys.executable}" "$@"\n'
    )
    wrapper.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(wrapper))
    with Cluster(settings_of(tmp_path / "kv")) as cluster:
        assert counter.read_text().count("x") == 3
        cold = assert_unharmed(cluster, decoder, "cold", STORED)
        assert all(each.cached.total == 0 for each in cold)
        warm = assert_unharmed(cluster, decoder, "warm", STORED)
        assert all(each.cached.device == len(STORED[0]) for each in warm)
        cluster.flush(["device", "host"])
        stored = assert_unharmed(cluster, decoder, "stored", STORED)
        assert all(each.cached.storage == len(STORED[0]) for each in stored)
        prefill_at_rest(cluster)
