"""`kvlift plan`: what a trace finds in caches of given sizes, in simulated time."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from kvlift.cli.main import main
from kvlift.runtime.demo.trace import TraceRequest
from kvlift.testing.plan.run import Row, planned, summary
from kvlift.testing.plan.sizes import GIB, Ask, PlanRefused, Rates, Sizes, config_of, grid

RATES = Rates()
PAGE_GIB = RATES.page_bytes / GIB
FIELDS = {"device_gib", "host_gib", "storage_gib", "hit", "ttft_s", "peer_bytes"}


def asked(seconds: float, blocks: Sequence[int], *, cut: int = 0, answer: int = 10) -> TraceRequest:
    """`cut`: tokens that the last block lacks."""
    return TraceRequest(
        timestamp=round(1000 * seconds),
        input_length=512 * len(blocks) - cut,
        output_length=answer,
        hash_ids=tuple(blocks),
    )


def plan_of(
    requests: Sequence[TraceRequest],
    *,
    device: int = 64,
    host: int = 0,
    storage: int = 0,
    n_nodes: int = 1,
    rates: Rates = RATES,
) -> Row:
    """Sizes in pages."""
    sizes = Sizes(
        device_gib=device * PAGE_GIB, host_gib=host * PAGE_GIB, storage_gib=storage * PAGE_GIB
    )
    return planned(requests, sizes, rates, n_nodes)


TURNS = [asked(0, [1, 2, 3, 4]), asked(10, [1, 2, 3, 4, 5]), asked(20, [1, 2, 3, 4, 5])]


def test_a_conversation_finds_its_earlier_turns_and_only_the_rest_is_sent() -> None:
    row = plan_of(TURNS)
    assert row.hit == {"device": pytest.approx(9 / 14, abs=1e-5), "host": 0.0, "storage": 0.0}
    assert row.peer_bytes == 5 * RATES.page_bytes
    assert (row.n_requests, row.n_refused, row.n_failed, row.n_retracted) == (3, 0, 0, 0)


def test_a_block_that_is_not_whole_is_never_found() -> None:
    row = plan_of([asked(0, [1, 2], cut=300), asked(10, [1, 2], cut=300)])
    assert row.hit["device"] == pytest.approx(512 / (2 * 724), abs=1e-5)


def test_what_the_device_has_lost_comes_from_the_host_and_then_from_storage() -> None:
    others = [asked(10 + n, range(100 * n, 100 * n + 6)) for n in range(1, 6)]
    requests = [asked(0, [1, 2, 3, 4]), *others, asked(60, [1, 2, 3, 4])]
    n_blocks = 4 + 30 + 4
    for host, storage, tier in ((0, 0, None), (64, 0, "host"), (8, 64, "storage")):
        row = plan_of(requests, device=8, host=host, storage=storage)
        for name, share in row.hit.items():
            assert share == pytest.approx(4 / n_blocks if name == tier else 0.0, abs=1e-5)


def test_the_first_token_takes_as_long_as_its_prompt_is_computed_and_sent() -> None:
    rates = Rates(prefill_tokens_per_s=1000, link_gbps=8, step_ms=10)
    [cold, warm] = (
        plan_of(requests, rates=rates).ttft_s
        for requests in ([asked(0, [1, 2])], [asked(0, [1, 2]), asked(10, [1, 2])])
    )
    computed_s, page_s = 1024 / 1000, rates.page_bytes / 1e9
    assert computed_s + page_s <= cold["mean"] <= computed_s + page_s + 0.06
    assert warm["p50"] == pytest.approx(cold["mean"])
    assert warm["mean"] < 0.55 * cold["mean"]


def test_a_slow_link_makes_the_cache_worth_more() -> None:
    turns = [asked(20 * n, range(4 + n)) for n in range(12)]
    slow, fast = (
        [plan_of(turns, device=n, rates=Rates(link_gbps=gbps)).ttft_s["mean"] for n in (17, 300)]
        for gbps in (2, 1000)
    )
    assert slow[0] >= slow[1]
    assert slow[1] > fast[1]


def lru_hits(requests: Sequence[TraceRequest], n_pages: int) -> int:
    """Blocks found by a plain LRU of prefixes: an independent count, one request after another."""
    kept: OrderedDict[int, None] = OrderedDict()
    n_hit = 0
    for request in requests:
        blocks = request.hash_ids
        n_found = next((at for at, block in enumerate(blocks) if block not in kept), len(blocks))
        n_hit += n_found
        for block in reversed(blocks):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > n_pages:
            kept.popitem(last=False)
    return n_hit


def test_hits_are_about_those_of_a_plain_lru_where_requests_do_not_overlap() -> None:
    draw, requests, histories = Random(5), [], [[100 * n + 1] for n in range(12)]
    for number in range(150):
        history = draw.choice(histories)
        history.append(1000 + number)
        requests.append(asked(5 * number, history[:8], answer=1))
    n_blocks = sum(len(request.hash_ids) for request in requests)
    for n_pages in (24, 48, 1000):
        row = plan_of(requests, device=n_pages)
        expected = lru_hits(requests, n_pages) / n_blocks
        assert row.hit["device"] == pytest.approx(expected, abs=0.03)


def test_two_nodes_keep_each_conversation_where_it_is() -> None:
    requests = [asked(5 * n, [*range(100 * (n % 2), 100 * (n % 2) + 4 + n // 2)]) for n in range(8)]
    one, two = plan_of(requests), plan_of(requests, n_nodes=2)
    assert two.hit == one.hit
    assert two.peer_bytes == one.peer_bytes


def test_a_request_that_is_larger_than_the_device_is_refused_and_counted() -> None:
    row = plan_of([asked(0, range(20)), asked(1, [1, 2])], device=8)
    assert (row.n_requests, row.n_refused, row.n_failed) == (2, 1, 0)


def test_long_answers_on_a_small_device_end_all_the_same() -> None:
    requests = [asked(0, [10 * n, 10 * n + 1], answer=3000) for n in range(6)]
    row = plan_of(requests, device=20, host=40)
    assert (row.n_refused, row.n_failed) == (0, 0)
    assert row.n_retracted > 0


def test_the_same_plan_twice_is_the_same() -> None:
    assert plan_of(TURNS, host=8, storage=8) == plan_of(TURNS, host=8, storage=8)


def test_answers_fill_pages_as_their_tokens_do() -> None:
    ask = Ask.of(3, asked(0, [7, 8], cut=12, answer=600), 0)
    assert ask.prompt.n_pages_full == 1
    assert [ask.n_pages(n) for n in (1, 13, 14, 600)] == [2, 2, 3, 4]
    for n_sampled in (1, 13, 600):
        n_core = ask.prompt.n_tokens + len(ask.output(n_sampled)) // 4 - 1
        assert n_core // 2 == max(1, (ask.n_tokens + n_sampled - 1) // 512)


def test_sizes_that_hold_nothing_or_too_much_are_refused() -> None:
    with pytest.raises(PlanRefused, match="at least two"):
        config_of(Sizes(device_gib=PAGE_GIB, host_gib=0, storage_gib=0), RATES)
    with pytest.raises(PlanRefused, match="at most"):
        config_of(Sizes(device_gib=1 << 20, host_gib=0, storage_gib=0), Rates(kv_bytes_per_token=1))


def test_a_grid_has_every_combination() -> None:
    assert len(grid([1, 2], [0, 4], [0, 8, 16])) == 12


def test_times_in_short() -> None:
    assert summary([]) == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}
    found = summary([n * 10**9 for n in range(1, 101)])
    assert found == {"mean": 50.5, "p50": 51.0, "p90": 91.0, "p99": 100.0}


# The command.


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": one.timestamp,
            "input_length": one.input_length,
            "output_length": one.output_length,
            "hash_ids": list(one.hash_ids),
        }
        for one in TURNS
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_command_prints_a_row_for_each_size(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked_for = ["plan", "--trace", str(trace), "--device-gib", "4", "--host-gib", "0,8"]
    assert main([*asked_for, "--storage-gib", "0,64", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["host_gib"], row["storage_gib"]) for row in rows] == [
        (0, 0), (0, 64), (8, 0), (8, 64),
    ]  # fmt: skip
    for row in rows:
        assert set(row) >= FIELDS
        assert set(row["hit"]) == {"device", "host", "storage"}
        assert set(row["ttft_s"]) == {"mean", "p50", "p90", "p99"}
        assert row["hit"]["device"] == pytest.approx(9 / 14, abs=1e-5)
        assert row["peer_bytes"] == 5 * RATES.page_bytes


def test_people_get_a_table_and_a_plot(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--trace", str(trace), "--host-gib", "0", "--storage-gib", "0"]) == 0
    out = capsys.readouterr().out
    assert "3 requests, 1 decode node" in out
    assert "64.3%" in out
    assert "█" in out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--device-gib", "much"], "is no list of GiB"),
        (["--host-gib", "-1"], "a size must be from 0"),
        (["--host-gib", "nan"], "a size must be from 0"),
        (["--device-gib", "0.1"], "at least two"),
        (["--device-gib", ",".join(["40"] * 200)], "give shorter ones"),
        (["--link-gbps", "0"], "link-gbps"),
    ],
)
def test_what_cannot_be_planned_for_is_told_in_one_line(
    words: list[str], named: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--trace", str(trace), *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert named in printed.err
    assert printed.err.count("\n") == 1


def test_a_file_that_is_no_trace_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("buy milk\n")
    assert main(["plan", "--trace", str(path)]) == 2
    assert "notes.txt, line 1" in capsys.readouterr().err


def test_the_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    assert "Example: kvlift plan --trace" in capsys.readouterr().out
