"""The reference worker in real processes: the same tokens from every tier, under every fault."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from kvlift.runtime.worker.gathering import Generation
from kvlift.runtime.worker.generation import EngineDownError, FinishKind, Request, Sampling
from kvlift.runtime.worker.launch import Cluster, ClusterRefusedError
from kvlift.runtime.worker.loading import ModelSource
from kvlift.runtime.worker.model import Decoder
from kvlift.runtime.worker.plain_engine import plain_scores
from kvlift.runtime.worker.settings import WorkerSettings

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
PAGE = 8
WAIT_S = 60


def prompt_of(seed: int, n_tokens: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(1024) for _ in range(n_tokens))


def greedy(n_new_tokens: int) -> Sampling:
    return Sampling(max_new_tokens=n_new_tokens, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.set_num_threads(1)
    return ModelSource().decoder()


def plain_tokens(decoder: Decoder, prompt: tuple[int, ...], n_new_tokens: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(n_new_tokens):
        tokens.append(int(decoder.plain_forward(torch.tensor(tokens))[0][-1].argmax()))
    return tuple(tokens[len(prompt) :])


def settings(storage: Path, **fields: Any) -> WorkerSettings:
    given: dict[str, Any] = {
        "page_tokens": PAGE,
        "device_pages": 256,
        "host_pages": 256,
        "storage_folder": str(storage),
        "ballot_deadline_s": 4.0,
        "peer_dead_s": 3.0,
    }
    return WorkerSettings(**given | fields)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(settings(tmp_path_factory.mktemp("worker") / "kv")) as running:
        yield running


def run(cluster: Cluster, rid: str, prompt: tuple[int, ...], sampling: Sampling) -> Generation:
    request = Request(rid=rid, tokens=prompt, sampling=sampling)
    return cluster.submit(request).result(WAIT_S)


def settled(cluster: Cluster) -> list[dict[str, Any]]:
    """The ranks' statistics once nothing is under way."""
    for _ in range(200):
        ranks: list[dict[str, Any]] = cluster.stats()["ranks"]
        if all(rank["leaks"] is not None for rank in ranks):
            return ranks
        time.sleep(0.05)
    raise AssertionError("the ranks never came to rest")


def test_every_tier_gives_the_tokens_and_log_probabilities_of_a_plain_forward(
    cluster: Cluster, decoder: Decoder
) -> None:
    prompt, n = prompt_of(1, 70), 8
    wanted = plain_tokens(decoder, prompt, n)
    scores = plain_scores(decoder, [*prompt, *wanted], len(prompt))
    cluster.verify_restored(is_on=True)
    n_verified = settled(cluster)[0]["pages_verified"]
    found: dict[str, Generation] = {}
    found["peer"] = run(cluster, "t-peer", prompt, greedy(n))
    found["device"] = run(cluster, "t-device", prompt, greedy(n))
    settled(cluster)
    cluster.flush(["device"])
    found["host"] = run(cluster, "t-host", prompt, greedy(n))
    settled(cluster)
    cluster.flush(["device", "host"])
    found["storage"] = run(cluster, "t-storage", prompt, greedy(n))
    for name, generation in found.items():
        assert generation.tokens == wanted, name
        assert generation.logprobs == pytest.approx(scores, abs=1e-4), name
    full = len(prompt) // PAGE * PAGE
    assert found["peer"].cached.total == 0
    assert found["device"].cached.device == full
    assert found["host"].cached.host == full
    assert found["storage"].cached.storage == full
    # Whatever is cached, the odd tokens at the end come from the peer.
    assert found["peer"].bytes_from_peer == 9 * found["storage"].bytes_from_peer > 0
    cluster.verify_restored(is_on=False)
    for rank in settled(cluster):
        assert rank["pages_verified"] - n_verified == 2 * (full // PAGE)
        assert rank["pages_wrong"] == 0
        assert rank["leaks"] == 0
        assert rank["ballots_per_tick_max"] == 1


def test_the_next_turn_takes_the_last_answer_from_the_cache(
    cluster: Cluster, decoder: Decoder
) -> None:
    prompt = prompt_of(2, 30)
    first = run(cluster, "turn-1", prompt, greedy(20))
    longer = (*prompt, *first.tokens, *prompt_of(3, 11))
    second = run(cluster, "turn-2", longer, greedy(6))
    assert second.tokens == plain_tokens(decoder, longer, 6)
    assert second.cached.device == (30 + 20 - 1) // PAGE * PAGE


def test_drawn_tokens_do_not_depend_on_where_the_kv_came_from(cluster: Cluster) -> None:
    prompt = prompt_of(4, 50)
    drawn = Sampling(max_new_tokens=12, temperature=0.9, top_p=0.9, seed=7, ignore_eos=True)
    cold = run(cluster, "drawn-1", prompt, drawn)
    warm = run(cluster, "drawn-2", prompt, drawn)
    other = run(cluster, "drawn-3", prompt, Sampling(max_new_tokens=12, temperature=0.9, seed=8))
    assert warm.cached.device == 48
    assert cold.tokens == warm.tokens != other.tokens


def test_nothing_of_a_cluster_listens_beyond_this_machine(cluster: Cluster) -> None:
    pids = [os.getpid(), *(child.pid for child in cluster.ranks)]
    assert cluster.prefill is not None
    open_sockets = {
        link.rsplit("[", 1)[1].rstrip("]")
        for pid in [*pids, cluster.prefill.pid]
        for link in _links(pid)
        if link.startswith("socket:")
    }
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[9] in open_sockets
    ]
    assert listening, "the rendezvous store listens at least"
    loopback = ("0100007F:", "0000000000000000FFFF00000100007F:", "0000000000000000000000000100")
    assert not [address for address in listening if not address.startswith(loopback)]


def _links(pid: int) -> list[str]:
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(entry))
    return found


def test_many_at_a_time_are_each_what_they_are_alone(cluster: Cluster, decoder: Decoder) -> None:
    prompts = [prompt_of(100 + i, 5 + 13 * i) for i in range(10)]
    generations = cluster.generate(
        [Request(rid=f"many-{i}", tokens=p, sampling=greedy(6)) for i, p in enumerate(prompts)]
    )
    for prompt, generation in zip(prompts, generations, strict=True):
        assert generation.tokens == plain_tokens(decoder, prompt, 6)
    assert [rank["leaks"] for rank in settled(cluster)] == [0, 0]


def test_tenants_with_equal_tokens_share_nothing(cluster: Cluster) -> None:
    prompt = prompt_of(5, 40)
    run(cluster, "red", prompt, greedy(2))
    sampling = greedy(2)
    blue = Request(rid="blue", tokens=prompt, sampling=sampling, tenant="blue")
    assert cluster.submit(blue).result(WAIT_S).cached.total == 0
    assert run(cluster, "red-again", prompt, sampling).cached.device == 40


def test_a_request_that_is_left_gives_everything_back(cluster: Cluster) -> None:
    request = Request(rid="left", tokens=prompt_of(6, 64), sampling=greedy(500))
    running = cluster.submit(request)
    time.sleep(0.3)
    assert cluster.run(cluster.engine.abort("left"))
    assert running.result(WAIT_S).finish.kind is FinishKind.ABORT
    assert not cluster.run(cluster.engine.abort("left"))
    closed = cluster.submit(Request(rid="closed", tokens=prompt_of(7, 64), sampling=greedy(500)))
    time.sleep(0.2)
    closed.cancel()
    for rank in settled(cluster):
        assert rank["leaks"] == 0
        assert rank["requests_live"] == 0


def test_a_request_that_cannot_fit_is_refused_and_holds_nothing(cluster: Cluster) -> None:
    refused = run(cluster, "too-long", prompt_of(8, 40), greedy(256 * PAGE))
    assert refused.finish.kind is FinishKind.ERROR
    assert refused.finish.status == 400
    assert "shorten it" in refused.finish.message
    assert [rank["leaks"] for rank in settled(cluster)] == [0, 0]


def test_a_damaged_restored_page_is_found_out(cluster: Cluster, decoder: Decoder) -> None:
    prompt = prompt_of(9, 64)
    wanted = run(cluster, "sound", prompt, greedy(8))
    settled(cluster)
    before = settled(cluster)
    cluster.flush(["device"])
    cluster.verify_restored(is_on=True)
    cluster.damage_next_restored()
    damaged = run(cluster, "damaged", prompt, greedy(8))
    cluster.verify_restored(is_on=False)
    after = settled(cluster)
    assert sum(rank["pages_damaged"] for rank in after) == 1
    n_wrong = [rank["pages_wrong"] for rank in after]
    assert sum(n_wrong) - sum(rank["pages_wrong"] for rank in before) == 1
    scores = plain_scores(decoder, [*prompt, *damaged.tokens], len(prompt))
    diffs = [abs(a - b) for a, b in zip(damaged.logprobs, scores, strict=True)]
    assert max(diffs) > 1e-3
    assert wanted.finish.kind is FinishKind.LENGTH
    cluster.flush(["device", "host", "storage"])


def test_storage_taken_away_in_mid_flight_fails_nobody(cluster: Cluster, decoder: Decoder) -> None:
    prompt = prompt_of(10, 72)
    wanted = plain_tokens(decoder, prompt, 4)
    run(cluster, "kept", prompt, greedy(4))
    settled(cluster)
    cluster.flush(["device", "host"])
    cluster.switch_storage(is_attached=False)
    without = run(cluster, "without", prompt, greedy(4))
    cluster.switch_storage(is_attached=True)
    assert without.tokens == wanted
    assert without.cached.total == 0


def test_files_that_are_truncated_or_unreadable_are_misses(
    cluster: Cluster, decoder: Decoder
) -> None:
    prompt = prompt_of(11, 72)
    wanted = plain_tokens(decoder, prompt, 4)
    folder = Path(cluster.settings.storage_folder)
    run(cluster, "stored", prompt, greedy(4))
    settled(cluster)
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096]
    assert files
    for index, path in enumerate(sorted(files)):
        if index % 3 == 0:
            os.truncate(path, path.stat().st_size // 2)
        elif index % 3 == 1:
            path.unlink()
            path.mkdir()
    cluster.flush(["device", "host"])
    generation = run(cluster, "damaged-files", prompt, greedy(4))
    assert generation.tokens == wanted
    assert generation.cached.storage < 72
    assert [rank["leaks"] for rank in settled(cluster)] == [0, 0]


def test_retracted_requests_come_back_and_say_the_same(tmp_path: Path, decoder: Decoder) -> None:
    draw = random.Random(5)
    requests = [
        Request(
            rid=f"r{index}",
            tokens=prompt_of(200 + index % 3, 60)[: draw.randrange(1, 60)]
            + prompt_of(300 + index, draw.randrange(1, 20)),
            sampling=greedy(draw.randrange(1, 50)),
        )
        for index in range(12)
    ]
    tight = settings(
        tmp_path / "kv",
        page_tokens=4,
        device_pages=40,
        host_pages=24,
        output_reserved_percent=0,
        driver={"decode_reserve_pages": 0},
    )
    with Cluster(tight) as cluster:
        generations = cluster.generate(requests)
        ranks = settled(cluster)
    for request, generation in zip(requests, generations, strict=True):
        n_new_tokens = request.sampling.max_new_tokens
        assert generation.tokens == plain_tokens(decoder, request.tokens, n_new_tokens)
    assert ranks[0]["retracted"] > 0
    assert [rank["leaks"] for rank in ranks] == [0, 0]


def test_aborts_flushes_and_lost_storage_on_few_pages_change_no_answer(
    tmp_path: Path, decoder: Decoder
) -> None:
    draw = random.Random(4)
    crowded = settings(
        tmp_path / "kv",
        page_tokens=4,
        device_pages=24,
        host_pages=30,
        n_running_max=3,
        output_reserved_percent=30,
        decode_chunk_tokens=5,
        driver={"decode_reserve_pages": 0, "write": "back", "prefetch": "best_effort"},
    )
    answers: list[tuple[Request, Generation]] = []
    with Cluster(crowded) as cluster:
        cluster.verify_restored(is_on=True)
        live: dict[str, tuple[Request, Any]] = {}
        until_s = time.monotonic() + 6
        while live or time.monotonic() < until_s:
            while len(live) < 8 and time.monotonic() < until_s:
                head = prompt_of(500 + draw.randrange(3), 60)[: draw.randrange(1, 50)]
                tokens = head + prompt_of(draw.randrange(1 << 30), draw.randrange(15))
                request = Request(
                    rid=str(draw.random()), tokens=tokens, sampling=greedy(draw.randrange(1, 30))
                )
                live[request.rid] = (request, cluster.submit(request))
            move = draw.random()
            if move < 0.1:
                cluster.run(cluster.engine.abort(draw.choice(list(live))))
            elif move < 0.15:
                cluster.flush(draw.choice([["device"], ["device", "host"], ["storage"]]))
            elif move < 0.18:
                cluster.switch_storage(is_attached=draw.random() < 0.6)
            time.sleep(0.02)
            for rid, (request, future) in list(live.items()):
                if future.done():
                    answers.append((request, future.result()))
                    del live[rid]
        ranks = settled(cluster)
    for request, generation in answers:
        assert generation.finish.kind is not FinishKind.ERROR, generation.finish.message
        if generation.finish.kind is FinishKind.LENGTH:
            n_new_tokens = request.sampling.max_new_tokens
            assert generation.tokens == plain_tokens(decoder, request.tokens, n_new_tokens)
    assert ranks[0]["retracted"] > 0
    for rank in ranks:
        assert (rank["leaks"], rank["pages_wrong"], rank["ballots_per_tick_max"]) == (0, 0, 1)


def test_prefill_killed_in_mid_transfer_and_ranks_that_stop(
    tmp_path: Path, decoder: Decoder, capfd: pytest.CaptureFixture[str]
) -> None:
    prompt = prompt_of(12, 40)
    wanted = plain_tokens(decoder, prompt, 4)
    slow = settings(tmp_path / "kv", link_gbps=0.002, ballot_deadline_s=2.0, peer_dead_s=2.0)
    with Cluster(slow) as cluster:
        assert run(cluster, "before", prompt, greedy(4)).tokens == wanted
        settled(cluster)
        cut = cluster.submit(Request(rid="cut", tokens=prompt_of(13, 800), sampling=greedy(4)))
        time.sleep(0.4)
        assert cluster.prefill is not None
        os.kill(cluster.prefill.pid, signal.SIGKILL)
        ended = cut.result(WAIT_S).finish
        assert ended.kind is FinishKind.ERROR
        assert ended.retryable
        assert "prefill node ipc://" in ended.message
        cluster.restart_prefill()
        assert run(cluster, "after", prompt, greedy(4)).tokens == wanted
        assert [rank["leaks"] for rank in settled(cluster)] == [0, 0]
        for victim in (1, 0):
            long = cluster.submit(
                Request(rid=f"long-{victim}", tokens=prompt, sampling=greedy(1000))
            )
            time.sleep(0.3)
            os.kill(cluster.ranks[victim].pid, signal.SIGSTOP)
            started_s = time.monotonic()
            with pytest.raises(EngineDownError, match=f"rank {victim} is late"):
                long.result(WAIT_S)
            assert time.monotonic() - started_s < 3 * slow.ballot_deadline_s
            cluster.restart_decode()
            again = run(cluster, f"again-{victim}", prompt, greedy(4))
            assert again.tokens == wanted
            assert again.cached.storage == 40
    assert "RankLate" in capfd.readouterr().err


def test_without_reuse_everything_comes_from_the_peer(tmp_path: Path, decoder: Decoder) -> None:
    alone = settings(
        tmp_path / "kv",
        n_ranks=1,
        decode_reuses=False,
        storage_folder="",
        host_pages=0,
    )
    prompt = prompt_of(14, 33)
    with Cluster(alone) as cluster:
        for index in range(2):
            generation = run(cluster, f"cold-{index}", prompt, greedy(5))
            assert generation.tokens == plain_tokens(decoder, prompt, 5)
            assert generation.cached.total == 0
            assert generation.n_pages_from_peer == 5


def test_a_request_goes_to_the_next_prefill_node_when_one_is_gone(
    tmp_path: Path, decoder: Decoder
) -> None:
    secret = "s" * 32
    alive = f"ipc://{tmp_path / 'alive.wire'}"
    gone = f"ipc://{tmp_path / 'gone.wire'}"
    prompt = prompt_of(15, 30)
    prefill = settings(tmp_path / "kv", role="prefill", prefill_bind=alive)
    decode = settings(tmp_path / "kv", role="decode", n_ranks=1, peers=(gone, alive))
    with Cluster(prefill, secret), Cluster(decode, secret) as cluster:
        for index in range(2):
            request = Request(
                rid=f"peer-{index}", tokens=prompt, sampling=greedy(3), salt=str(index)
            )
            generation = cluster.submit(request).result(WAIT_S)
            assert generation.tokens == plain_tokens(decoder, prompt, 3)
            assert generation.n_pages_from_peer == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"role": "decode"}, "give --peer"),
        ({"n_ranks": 0}, "n_ranks must be between"),
        ({"n_ranks": 4}, "choose a number of ranks"),
        ({"model": "/nowhere"}, "Hugging Face folder"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    cluster = Cluster(settings(tmp_path / "kv", **fields))
    with pytest.raises(ValueError, match=message), cluster:
        pass
    assert not cluster.ranks


def test_a_wrong_driver_config_is_refused_before_anything_starts(tmp_path: Path) -> None:
    wrong = settings(tmp_path / "kv", n_ranks=1, driver={"prefech": "deadline"})
    with pytest.raises(ClusterRefusedError, match="did you mean 'prefetch'"), Cluster(wrong):
        pass


def test_a_cluster_needs_an_address_for_its_prefill_role(tmp_path: Path) -> None:
    with (
        pytest.raises(ClusterRefusedError, match="prefill-bind"),
        Cluster(settings(tmp_path / "kv", role="prefill")),
    ):
        pass


@contextlib.contextmanager
def serving(tmp_path: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`kvlift serve` as a user starts it, and its address."""
    command = [sys.executable, "-m", "kvlift", "serve", "--port", "0", "--page-tokens", str(PAGE)]
    process = subprocess.Popen(
        [*command, "--storage", str(tmp_path / "kv"), *options],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
    )
    assert process.stderr is not None
    watchdog = threading.Timer(WAIT_S, process.kill)
    watchdog.start()
    try:
        address = ""
        for line in process.stderr:
            if line.startswith("ready "):
                address = line.split()[1]
                break
        assert address, "kvlift serve ended before it was ready"
        yield process, address
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stderr.close()


def call(address: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(f"{address}{path}", data=data)
    with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
        text = reply.read().decode()
    return json.loads(text) if text.startswith("{") else text


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


def test_serve_answers_both_dialects_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, address):
        body = {
            "input_ids": list(prompt_of(20, 40)),
            "sampling_params": {"temperature": 0, "max_new_tokens": 6},
            "return_logprob": True,
            "logprob_start_len": 30,
        }
        first = call(address, "/generate", body)
        again = call(address, "/generate", body)
        time.sleep(0.5)
        assert "device, host" in call(address, "/flush_cache", {})
        stored = call(address, "/generate", body)
        for other in (again, stored):
            assert other["output_ids"] == first["output_ids"]
            for ours, theirs in zip(
                other["meta_info"]["output_token_logprobs"],
                first["meta_info"]["output_token_logprobs"],
                strict=True,
            ):
                assert ours[0] == pytest.approx(theirs[0], abs=1e-4)
        tiers = [each["meta_info"]["cached_tokens_details"] for each in (first, again, stored)]
        assert [tier["device"] for tier in tiers] == [0, 40, 0]
        assert [tier["storage"] for tier in tiers] == [0, 0, 40]
        assert len(first["meta_info"]["input_token_logprobs"]) == 10
        with openai.OpenAI(api_key="none", base_url=f"{address}/v1", max_retries=0) as client:
            chat = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=4
            )
            assert chat.usage is not None
            assert chat.usage.completion_tokens <= 4
        metrics = call(address, "/metrics")
        assert "kvlift_worker_requests_total" in metrics
        assert 'kvlift_tickets{rank="0"}' in metrics
        children = children_of(process.pid)
        assert len(children) == 3
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert not [child for child in children if Path(f"/proc/{child}").exists()]
        assert not list(tmp_path.glob("kvlift-*"))


def test_serve_ends_with_the_reason_when_a_rank_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path, "--ranks", "1") as (process, _address):
        ranks = [
            child
            for child in children_of(process.pid)
            if "worker.rank" in Path(f"/proc/{child}/cmdline").read_text()
        ]
        os.kill(ranks[0], signal.SIGKILL)
        assert process.wait(30) == 1
        assert process.stderr is not None
        assert "rank 0 was ended by SIGKILL" in process.stderr.read()


def test_serve_starts_a_dead_prefill_process_again(tmp_path: Path) -> None:
    body = {
        "input_ids": list(prompt_of(21, 20)),
        "sampling_params": {"temperature": 0, "max_new_tokens": 3},
    }
    with serving(tmp_path, "--ranks", "1") as (process, address):
        first = call(address, "/generate", body)
        [prefill] = [
            child
            for child in children_of(process.pid)
            if "prefill_process" in Path(f"/proc/{child}/cmdline").read_text()
        ]
        os.kill(prefill, signal.SIGKILL)
        for _ in range(60):
            with contextlib.suppress(urllib.error.HTTPError):
                assert call(address, "/generate", body)["output_ids"] == first["output_ids"]
                return
            time.sleep(0.5)
        raise AssertionError("the prefill process never came back")


def test_orphans_end_by_themselves_when_the_launcher_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path, "--ranks", "1") as (process, _address):
        children = children_of(process.pid)
        process.kill()
        for _ in range(200):
            if not [child for child in children if _lives(child)]:
                return
            time.sleep(0.1)
        raise AssertionError(f"orphans are left: {children}")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
