"""Very many at once, and very many that leave: minutes, so only `make deep` runs these."""

import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from kvlift.runtime.worker.generation import EngineBusyError, FinishKind
from kvlift.runtime.worker.launch import Cluster
from kvlift.runtime.worker.model import Decoder
from tests.real.harm_world import (
    Running,
    abort,
    assert_as_plain,
    pids_of,
    prefill_at_rest,
    prompt_of,
    ranks_at_rest,
    request_of,
    settings_of,
    whole_decoder,
)

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1800)]

N_ABORTS = 1_000
N_AT_A_TIME = 25
N_REQUESTS = 10_000
N_PROMPTS = 400
LONG_S = 1_500.0
GROWTH_BYTES_MAX = 256 << 20


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return whole_decoder()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    settings = settings_of(
        tmp_path / "kv",
        n_requests_max=N_REQUESTS,
        link_gbps=0.1,
        ballot_deadline_s=60.0,
        peer_dead_s=30.0,
    )
    with Cluster(settings) as made:
        yield made


def tell(what: str, **figures: Any) -> None:
    """The figures of a long run, for who runs it with `-s`."""
    print(json.dumps({"test": what, **figures}), flush=True)


def rss_bytes(cluster: Cluster) -> list[int]:
    texts = [Path(f"/proc/{pid}/statm").read_text().split() for pid in pids_of(cluster)]
    return [int(text[1]) * 4096 for text in texts]


def test_a_thousand_aborts_at_random_moments_leave_nothing_behind(
    cluster: Cluster, decoder: Decoder
) -> None:
    draw = random.Random(12)
    known = [prompt_of(seed, 160) for seed in range(900, 908)]
    cluster.generate([request_of(f"store-{n}", prompt, 4) for n, prompt in enumerate(known)])
    short = prompt_of(910, 30)
    ended: Counter[str] = Counter()
    started_s = time.monotonic()
    decoding = Running.started(cluster, request_of("beside", short, 2500))
    for round_number in range(N_ABORTS // N_AT_A_TIME):
        rids = [f"abort-{round_number}-{index}" for index in range(N_AT_A_TIME)]
        going = []
        for rid in rids:
            begin = draw.choice(known)[: draw.randrange(1, 160)]
            prompt = begin + prompt_of(draw.randrange(9999), draw.choice((5, 40, 300)))
            going.append(cluster.submit(request_of(rid, prompt, draw.randrange(1, 200))))
            time.sleep(draw.random() * 0.01)
        if round_number % 3 == 0:
            cluster.flush(draw.choice((["device"], ["device", "host"], ["storage"])))
        for rid, future in draw.sample(list(zip(rids, going, strict=True)), len(rids)):
            time.sleep(draw.random() * 0.02)
            if draw.random() < 0.3:
                future.cancel()  # as a client does that closes its connection
            else:
                abort(cluster, rid)
        for future in going:
            try:
                ended[future.result(LONG_S).finish.kind.value] += 1
            except CancelledError:
                ended["left"] += 1
    aborting_s = time.monotonic() - started_s
    abort(cluster, "beside")
    assert decoding.finish.result(LONG_S).kind in (FinishKind.ABORT, FinishKind.LENGTH)
    assert set(ended) <= {"abort", "length", "left"}
    assert ended["abort"] + ended["left"] > N_ABORTS // 2
    rest_s = time.monotonic()
    ranks_at_rest(cluster)
    prefill_at_rest(cluster)
    rest_s = time.monotonic() - rest_s
    generations = cluster.generate(
        [request_of(f"after-{n}", prompt, 4) for n, prompt in enumerate(known)]
    )
    for prompt, generation in zip(known, generations, strict=True):
        assert_as_plain(decoder, prompt, generation)
    ranks_at_rest(cluster)
    tell("1,000 aborts", seconds=round(aborting_s, 1), rest_s=round(rest_s, 2), ended=dict(ended))


def test_ten_thousand_requests_in_one_go_all_end_and_all_are_right(
    cluster: Cluster, decoder: Decoder
) -> None:
    draw = random.Random(13)
    prompts = [prompt_of(2000 + n, draw.choice((9, 24, 60))) for n in range(N_PROMPTS)]
    cluster.generate([request_of("first", prompts[0], 2)])
    before = rss_bytes(cluster)
    started_s = time.monotonic()
    chosen = [draw.randrange(N_PROMPTS) for _ in range(N_REQUESTS)]
    futures = [
        cluster.submit(request_of(f"many-{n}", prompts[which], 2)) for n, which in enumerate(chosen)
    ]
    generations = [future.result(LONG_S) for future in futures]
    took_s = time.monotonic() - started_s
    told: dict[int, tuple[int, ...]] = {}
    n_cached = 0
    for which, generation in zip(chosen, generations, strict=True):
        if which not in told:
            assert_as_plain(decoder, prompts[which], generation)
            told[which] = generation.tokens
        assert generation.finish.kind is FinishKind.LENGTH
        assert generation.tokens == told[which]
        n_cached += generation.cached.total > 0
    ranks_at_rest(cluster)
    prefill_at_rest(cluster)
    grown = max(now - then for now, then in zip(rss_bytes(cluster), before, strict=True))
    assert grown < GROWTH_BYTES_MAX
    assert n_cached > N_REQUESTS // 2
    tell(
        "10,000 requests",
        seconds=round(took_s, 1),
        from_cache=n_cached,
        rss_growth_mib=grown >> 20,
        ttft_max_s=round(max(each.ttft_s for each in generations), 1),
    )


def test_of_ten_thousand_requests_a_short_queue_refuses_what_is_too_much_at_once(
    tmp_path: Path, decoder: Decoder
) -> None:
    prompts = [prompt_of(3000 + n, 24) for n in range(50)]
    with Cluster(settings_of(tmp_path / "kv", n_requests_max=256)) as cluster:
        started_s = time.monotonic()
        futures = [
            cluster.submit(request_of(f"many-{n}", prompts[n % 50], 2)) for n in range(N_REQUESTS)
        ]
        n_right = n_busy = 0
        for n, future in enumerate(futures):
            with contextlib.suppress(EngineBusyError):
                generation = future.result(LONG_S)
                if n_right < 300:
                    assert_as_plain(decoder, prompts[n % 50], generation)
                n_right += 1
                continue
            n_busy += 1
        took_s = time.monotonic() - started_s
        assert n_right + n_busy == N_REQUESTS
        assert n_right >= 256
        assert n_busy > N_REQUESTS // 2
        ranks_at_rest(cluster)
        prefill_at_rest(cluster)
        tell("10,000 requests, a queue of 256", seconds=round(took_s, 1), served=n_right)
