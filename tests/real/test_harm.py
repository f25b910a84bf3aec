"""Real processes and folders that are killed, stopped, filled up and damaged.

One cluster for the whole file: each test begins with a whole one and heals what it has hurt. The
plain forward says what the tokens must be, whatever happened to the tiers.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from kvlift.runtime.worker.gathering import Generation
from kvlift.runtime.worker.generation import EngineDownError, FinishKind
from kvlift.runtime.worker.launch import Cluster
from kvlift.runtime.worker.model import Decoder
from tests.real.harm_world import (
    PAGE,
    WAIT_S,
    Running,
    abort,
    assert_as_plain,
    is_alive,
    likeliest,
    pids_of,
    prefill_at_rest,
    prompt_of,
    ranks_at_rest,
    request_of,
    run,
    settings_of,
    small_disk,
    until,
    whole_decoder,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

DEADLINE_S = 3.0
LONG_TOKENS = 1600
LINK_GBPS = 0.02
"""2.5 MB/s: a long prompt's pages, 3.3 MB of both ranks, are under way for more than a second."""

STORED = [prompt_of(seed, 160) for seed in range(500, 506)]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return whole_decoder()


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = settings_of(
        tmp_path_factory.mktemp("harm") / "disk" / "kv",
        link_gbps=LINK_GBPS,
        ballot_deadline_s=DEADLINE_S,
        prefill_chunk_tokens=512,
    )
    with Cluster(settings) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """A whole cluster, and whole again afterwards."""
    if shared_cluster.prefill_died.is_set():
        shared_cluster.restart_prefill()
    if shared_cluster.died.is_set():
        shared_cluster.restart_decode()
    yield shared_cluster
    if not shared_cluster.died.is_set():
        ranks_at_rest(shared_cluster)


def folder_of(cluster: Cluster) -> Path:
    return Path(cluster.settings.storage_folder)


def page_files(cluster: Cluster) -> list[Path]:
    return sorted((folder_of(cluster) / "v1" / "pages").rglob("*.page"))


def play(cluster: Cluster, prompts: Sequence[tuple[int, ...]], name: str) -> list[Generation]:
    return cluster.generate(
        [request_of(f"{name}-{index}", prompt, 4) for index, prompt in enumerate(prompts)]
    )


def assert_unharmed(
    cluster: Cluster, decoder: Decoder, prompts: Sequence[tuple[int, ...]], name: str
) -> list[Generation]:
    """Every request ends well and says what the plain model says."""
    generations = play(cluster, prompts, name)
    for prompt, generation in zip(prompts, generations, strict=True):
        assert_as_plain(decoder, prompt, generation)
    ranks_at_rest(cluster)
    return generations


def store_prompts(cluster: Cluster) -> None:
    """All of STORED are on storage, and there only."""
    play(cluster, STORED, "store")
    ranks_at_rest(cluster)
    assert len(page_files(cluster)) >= 2 * sum(len(prompt) // PAGE for prompt in STORED)
    cluster.flush(["device", "host"])


# -- the prefill process --------------------------------------------------------------------------


def test_a_prefill_process_killed_in_mid_transfer_ends_what_needs_it_and_nothing_else(
    cluster: Cluster, decoder: Decoder
) -> None:
    assert cluster.prefill is not None
    short, long = prompt_of(1, 40), [prompt_of(seed, LONG_TOKENS) for seed in (2, 3, 4)]
    before = ranks_at_rest(cluster)
    n_bytes_before = [rank["bytes_from_peer"] for rank in before]
    decoding = Running.started(cluster, request_of("decoding", short, 400))
    cut = [
        cluster.submit(request_of(f"cut-{index}", prompt, 4)) for index, prompt in enumerate(long)
    ]
    whole = sum(n_pages_of(prompt) for prompt in (short, *long)) * before[0]["page_bytes"]

    def n_bytes_received() -> list[int]:
        ranks = cluster.stats()["ranks"]
        return [rank["bytes_from_peer"] - n for rank, n in zip(ranks, n_bytes_before, strict=True)]

    n_under_way = 10 * before[0]["page_bytes"]
    until(lambda: min(n_bytes_received()) > n_under_way, "pages under way")
    assert max(n_bytes_received()) < whole
    assert not any(each.done() for each in cut)
    prefill_stats = cluster.stats()["prefill"]
    os.kill(cluster.prefill.pid, signal.SIGKILL)
    for each in cut:
        finish = each.result(WAIT_S).finish
        assert finish.kind is FinishKind.ERROR
        assert finish.retryable
        assert finish.status == 503
        assert finish.message.startswith(f"prefill node {prefill_stats['address']} is gone: ")
    # Its prompt is here, so it goes on as if nothing had happened.
    assert decoding.finish.result(WAIT_S).kind is FinishKind.LENGTH
    assert len(decoding.tokens) == 400
    assert likeliest(decoder, short, decoding.tokens) == decoding.tokens
    alone = run(cluster, "while-it-is-gone", prompt_of(5, 40)).finish
    assert (alone.kind, alone.retryable) == (FinishKind.ERROR, True)
    ranks_at_rest(cluster)
    cluster.restart_prefill()
    assert_unharmed(cluster, decoder, [*long, prompt_of(6, 40)], "after")
    prefill_at_rest(cluster)


def n_pages_of(prompt: Sequence[int]) -> int:
    return -(-len(prompt) // PAGE)


# -- storage --------------------------------------------------------------------------------------


def test_stored_pages_that_are_truncated_or_have_a_changed_bit_are_computed_again(
    cluster: Cluster, decoder: Decoder
) -> None:
    store_prompts(cluster)
    files, draw = page_files(cluster), random.Random(7)
    for path in draw.sample(files, len(files) // 8):
        harm = draw.choice((truncate, flip_a_bit, empty, grow))
        harm(path, draw)
    verified = [rank["pages_verified"] for rank in ranks_at_rest(cluster)]
    cluster.verify_restored(is_on=True)
    generations = assert_unharmed(cluster, decoder, STORED, "damaged")
    cluster.verify_restored(is_on=False)
    n_stored = sum(each.cached.storage for each in generations)
    assert 0 < n_stored < sum(len(prompt) for prompt in STORED)
    for rank, n_before in zip(ranks_at_rest(cluster), verified, strict=True):
        assert rank["pages_verified"] - n_before == n_stored // PAGE
        assert rank["pages_wrong"] == 0


def truncate(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(1, path.stat().st_size))


def empty(path: Path, _draw: random.Random) -> None:
    os.truncate(path, 0)


def grow(path: Path, draw: random.Random) -> None:
    with path.open("ab") as file:
        file.write(draw.randbytes(100))


def flip_a_bit(path: Path, draw: random.Random) -> None:
    with path.open("r+b") as file:
        at = draw.randrange(path.stat().st_size)
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ (1 << draw.randrange(8))]))


def test_a_storage_folder_that_goes_away_under_way_fails_nobody(
    cluster: Cluster, decoder: Decoder, capfd: pytest.CaptureFixture[str]
) -> None:
    store_prompts(cluster)
    folder, away = folder_of(cluster), folder_of(cluster).with_name("away")
    is_over = threading.Event()

    def come_and_go() -> None:
        while not is_over.wait(0.03):
            with a_file_in_place_of(folder, away):
                is_over.wait(0.03)

    wind = threading.Thread(target=come_and_go)
    wind.start()
    try:
        for turn in range(3):
            assert_unharmed(cluster, decoder, STORED, f"windy-{turn}")
            cluster.flush(["device", "host"])
    finally:
        is_over.set()
        wind.join()
    with a_file_in_place_of(folder, away):
        lost = assert_unharmed(cluster, decoder, STORED, "no-folder")
    assert sum(each.cached.storage for each in lost) == 0
    assert "ENOTDIR" in capfd.readouterr().err
    cluster.flush(["device", "host"])
    back = assert_unharmed(cluster, decoder, STORED, "folder-is-back")
    assert sum(each.cached.storage for each in back) > 0


@contextlib.contextmanager
def a_file_in_place_of(folder: Path, away: Path) -> Iterator[None]:
    folder.rename(away)
    folder.write_text("a file where the folder was")
    try:
        yield
    finally:
        folder.unlink()
        away.rename(folder)


def test_a_storage_that_is_full_and_then_read_only_fails_nobody(
    cluster: Cluster, decoder: Decoder, capfd: pytest.CaptureFixture[str]
) -> None:
    store_prompts(cluster)
    fresh = [prompt_of(seed, 200) for seed in range(30, 34)]
    with on_a_small_disk(folder_of(cluster)) as disk:
        fill_up(disk)
        assert_unharmed(cluster, decoder, [*STORED, *fresh], "full")
        cluster.flush(["device", "host"])
        found = assert_unharmed(cluster, decoder, [*STORED, *fresh], "full-again")
        assert sum(each.cached.storage for each in found[: len(STORED)]) > 0
        assert n_bytes_free(disk) < 1 << 16, "the disk was full all the time"
        assert "ENOSPC" in capfd.readouterr().err
        (disk / "ballast").unlink()
        until(lambda: is_read_only(disk), "nobody has a file open, and so it can be read-only")
        cluster.flush(["device", "host", "storage"])
        # Not even forgetting works on it, and what is still there is still true.
        assert_unharmed(cluster, decoder, [*STORED, *fresh, prompt_of(21, 90)], "read-only")
        assert "EROFS" in capfd.readouterr().err


@contextlib.contextmanager
def on_a_small_disk(folder: Path) -> Iterator[Path]:
    """Move a folder in use to a file system of its own, and back to its old contents."""
    aside = folder.with_name("aside")
    with small_disk(folder.parent / "small", 48) as disk:
        shutil.copytree(folder, disk / "kv")
        (disk / "kv").chmod(0o700)
        folder.rename(aside)
        folder.symlink_to(disk / "kv", target_is_directory=True)
        try:
            yield disk
        finally:
            folder.unlink()
            aside.rename(folder)


def fill_up(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as ballast:
        for size_bytes in (1 << 16, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    ballast.write(bytes(size_bytes))


def is_read_only(disk: Path) -> bool:
    remounted = subprocess.run(
        ["mount", "-o", "remount,ro", str(disk)], capture_output=True, check=False
    )
    return remounted.returncode == 0


def n_bytes_free(disk: Path) -> int:
    facts = os.statvfs(disk)
    return facts.f_bavail * facts.f_frsize


# -- aborts ---------------------------------------------------------------------------------------


def test_a_hundred_aborts_at_random_moments_leave_nothing_behind(
    cluster: Cluster, decoder: Decoder
) -> None:
    draw = random.Random(11)
    store_prompts(cluster)
    ended: list[FinishKind] = []
    for round_number in range(10):
        rids = [f"abort-{round_number}-{index}" for index in range(10)]
        going = []
        for rid in rids:
            known = draw.choice(STORED)
            prompt = known[: draw.randrange(1, 160)] + prompt_of(draw.randrange(9999), 40)
            going.append(cluster.submit(request_of(rid, prompt, draw.randrange(1, 200))))
            time.sleep(draw.random() * 0.02)
        if round_number % 3 == 0:
            cluster.flush(draw.choice((["device"], ["device", "host"])))
        for rid, future in draw.sample(list(zip(rids, going, strict=True)), len(rids)):
            time.sleep(draw.random() * 0.03)
            if draw.random() < 0.3:
                future.cancel()  # as a client does that closes its connection
            else:
                abort(cluster, rid)
        for future in going:
            with contextlib.suppress(CancelledError):
                ended.append(future.result(WAIT_S).finish.kind)
    assert set(ended) <= {FinishKind.ABORT, FinishKind.LENGTH}
    assert ended.count(FinishKind.ABORT) > 20
    ranks_at_rest(cluster)
    prefill_at_rest(cluster)
    assert_unharmed(cluster, decoder, STORED, "after-aborts")


# -- the decode ranks -----------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [1, 0])
def test_a_stopped_rank_is_named_by_the_others_and_the_group_ends_and_starts_again(
    cluster: Cluster, decoder: Decoder, capfd: pytest.CaptureFixture[str], victim: int
) -> None:
    prompt = STORED[victim]
    decoding = Running.started(cluster, request_of(f"long-{victim}", prompt, 1500))
    filling = cluster.submit(request_of(f"fill-{victim}", prompt_of(60 + victim, LONG_TOKENS), 4))
    time.sleep(0.2)
    pids = pids_of(cluster)
    os.kill(pids[victim], signal.SIGSTOP)
    stopped_s = time.monotonic()
    reasons = []
    for future in (decoding.finish, filling):
        with pytest.raises(EngineDownError) as raised:
            future.result(WAIT_S)
        reasons.append(str(raised.value))
    # A step's sum is waited for once, and who is missing is asked for once more.
    assert time.monotonic() - stopped_s < 3 * DEADLINE_S
    assert all(f"rank {victim} is late" in reason for reason in reasons)
    assert f"rank {victim} is late" in cluster.fault
    other = 1 - victim
    until(lambda: not is_alive(pids[other]), "the other rank has ended by itself", 3 * DEADLINE_S)
    with pytest.raises(EngineDownError, match=f"rank {victim} is late"):
        run(cluster, f"refused-{victim}", prompt)
    told = capfd.readouterr().err
    assert re.search(rf"^rank {other}: RankLate: .*rank {victim} is late", told, re.MULTILINE)
    cluster.restart_decode()
    assert not any(is_alive(pid) for pid in pids)
    assert not set(pids) & set(pids_of(cluster))
    again = assert_unharmed(cluster, decoder, STORED, f"again-{victim}")
    assert again[victim].cached.storage == len(prompt)


def test_a_decode_worker_that_was_killed_finds_its_storage_again(
    cluster: Cluster, decoder: Decoder
) -> None:
    store_prompts(cluster)
    pids = pids_of(cluster)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(cluster.died.is_set, "the launcher has noticed")
    assert "was ended by SIGKILL" in cluster.fault
    cluster.restart_decode()
    found = assert_unharmed(cluster, decoder, STORED, "found-again")
    for prompt, generation in zip(STORED, found, strict=True):
        assert generation.cached.storage == len(prompt) // PAGE * PAGE
        assert generation.cached.device == generation.cached.host == 0
    warm = assert_unharmed(cluster, decoder, STORED, "warm-again")
    assert all(each.cached.device == len(STORED[0]) for each in warm)
