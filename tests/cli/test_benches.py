"""The benches in small, and the parts of the multi-turn benchmark that decide its figures."""

import json
import sys
import zlib

import attrs
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

from kvlift.cli.bench import bench, in_short
from kvlift.cli.benches.row import Row, machine
from kvlift.cli.benches.ttft.allowed import Asked, allowed_ttfts
from kvlift.cli.benches.ttft.attention import paged_plain, prefill_attention_plain
from kvlift.cli.benches.ttft.batch import StepTime
from kvlift.cli.benches.ttft.machine import Rates
from kvlift.cli.benches.ttft.pages import Fingerprints, words_of_kv, words_of_memory
from kvlift.cli.benches.ttft.play import Played, Served
from kvlift.cli.benches.ttft.sizes import MODES, TINY
from kvlift.cli.benches.ttft.tpot import change_at_equal_batch
from kvlift.cli.benches.ttft.workload import Turn, fresh_tokens, turns_of
from kvlift.effects.checksum import crc32
from kvlift.effects.device_memory import LayeredMemory

RATES = Rates(
    restore_bytes_s=1000.0,
    storage_bytes_s=500.0,
    prefill_s_by_round=(1.0,),
    chunks_s_by_round=((1.0,),),
    step_ms=1.0,
)
GBPS_OF_100_BYTES = 100 * 8 / 1e9


def rows_of(name: str, *options: str) -> dict[str, dict[str, object]]:
    result = CliRunner().invoke(bench, [name, "--json", *options])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["bench"] == name
    assert {"processor", "n_cpus"} <= set(answer["machine"])
    rows = {row["case"]: row for row in answer["rows"]}
    assert all({"value", "unit", "ceiling", "ratio"} <= set(row) for row in rows.values())
    assert not any("error" in row for row in rows.values())
    return rows


@pytest.mark.real
def test_all_modes_serve_the_same_turns_with_verified_pages() -> None:
    rows = rows_of("ttft", "--tiny")
    plays = {str(row["mode"]): row for row in rows.values() if "mode" in row}
    assert set(plays) == set(MODES)
    for row in plays.values():
        assert row["requests"] == TINY.n_conversations * len(TINY.prompt_tokens)
        assert row["failed"] == row["leaks"] == 0
        assert isinstance(row["pages_verified"], int)
        assert row["pages_verified"] > 0
    assert plays["none"]["hit_rate"] == 0
    sent = [plays[mode]["bytes_from_peer"] for mode in MODES]
    assert sent == sorted(sent, key=lambda n: -int(str(n)))
    assert len(set(sent[:3])) == 3
    assert plays["all"]["hit_rate"] == plays["all"]["hit_rate_ideal"]


@pytest.mark.real
def test_pages_come_over_the_wire_beside_a_plain_socket() -> None:
    rows = rows_of("transfer", "--tiny")
    assert set(rows) == {"transfer-1MiB"}
    # A plain copy of 4 MiB that takes as long as a delayed receipt (40 ms) was not one.
    assert float(str(rows["transfer-1MiB"]["ceiling"])) > 4 * 2**20 / 0.03 / 1e9


@pytest.mark.real
def test_copies_are_measured_without_a_gpu_too() -> None:
    rows = rows_of("copies", "--tiny")
    expected = {"restore-8MiB", "restore-1MiB", "writethrough-8MiB", "writethrough-1MiB"}
    assert expected <= set(rows)
    assert any(case.startswith("storage-to-device") for case in rows)


def told(monkeypatch: pytest.MonkeyPatch, rows: list[Row], *options: str) -> Result:
    """What `bench copies` says to people, 80 columns wide, of these rows."""
    monkeypatch.setattr("kvlift.cli.benches.copies.measure", lambda _progress, **_sizes: rows)
    monkeypatch.setattr(
        "kvlift.cli.bench.table_console",
        lambda: Console(file=sys.stdout, width=80, highlight=False),
    )
    return CliRunner().invoke(bench, ["copies", *options])


RATE = Row(case="writethrough-8MiB", value=52.94, unit="GB/s", ceiling=55.2, ratio=0.959, note="of")
TIME = Row(case="submit-writethrough-8MiB", value=8.29, unit="us/page", ceiling=5.0, ratio=1.658)
BARE = Row(case="ceiling-writethrough-8MiB", value=55.2, unit="GB/s")


def test_the_table_fits_80_columns_and_says_which_way_is_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = told(monkeypatch, [RATE, TIME, BARE])
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert max(map(len, lines)) <= 80
    by_case = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert by_case["writethrough-8MiB"][1:] == ["52.94", "GB/s", "55.2", "0.96", "higher"]
    assert by_case["submit-writethrough-8MiB"][-1] == "lower"
    assert by_case["ceiling-writethrough-8MiB"][1:] == ["55.2", "GB/s"]
    assert "writethrough-8MiB: of" in lines
    assert "--tiny" not in result.stdout
    assert "say how fast it is" in " ".join(told(monkeypatch, [RATE], "--tiny").stdout.split())


def test_a_case_that_could_not_be_measured_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Row(case="restore-8MiB", value=0.0, unit="", more={"error": "OSError: no room"})
    result = told(monkeypatch, [RATE, failed])
    assert result.exit_code == 1
    assert "restore-8MiB: not measured: OSError: no room" in result.stdout
    assert told(monkeypatch, [RATE, failed], "--json").exit_code == 1


def test_benches_without_small_sizes_say_so() -> None:
    result = CliRunner().invoke(bench, ["index", "--tiny"])
    assert result.exit_code != 0
    assert "no small sizes" in result.output


def asked(name: int, arrival_s: float, **pages: int) -> Asked:
    turn = Turn(name, 0, arrival_s, b"", b"")
    at = {"n_host": 0, "n_storage": 0, "n_peer": 0} | pages
    return Asked(turn, sum(at.values()), (1.0, 1.0), at["n_host"], at["n_storage"], at["n_peer"])


def test_what_is_allowed_streams_beside_prefill_and_waits_for_the_link() -> None:
    # Two chunks of a second, two pages of 100 bytes each; a page takes a second on the link.
    only = allowed_ttfts([asked(0, 5.0, n_peer=4)], RATES, GBPS_OF_100_BYTES, 100, 2)
    assert only == {"c0r0": pytest.approx(1 + 4)}  # it begins with the first chunk's end
    both = [asked(0, 0.0, n_peer=4), asked(1, 0.0, n_peer=4)]
    ttfts = allowed_ttfts(both, RATES, GBPS_OF_100_BYTES, 100, 2)
    assert ttfts == {"c0r0": pytest.approx(5), "c1r0": pytest.approx(9)}
    fast = allowed_ttfts(both, RATES, GBPS_OF_100_BYTES * 1e6, 100, 2)
    assert fast == {"c0r0": pytest.approx(2, abs=1e-3), "c1r0": pytest.approx(4, abs=1e-3)}


def test_what_is_allowed_counts_restores_at_their_rates() -> None:
    # 30 pages of 100 bytes: 3 s from the host; from storage at its rate, 6 s.
    host = allowed_ttfts([asked(0, 0.0, n_host=30)], RATES, GBPS_OF_100_BYTES, 100, 2)
    storage = allowed_ttfts([asked(0, 0.0, n_storage=30)], RATES, GBPS_OF_100_BYTES, 100, 2)
    assert host == {"c0r0": pytest.approx(3)}
    assert storage == {"c0r0": pytest.approx(6)}


def played(scale: float, turns: list[Turn]) -> Played:
    """One step a request, whose time is 2 + rows + context / 100 ms, times `scale`."""
    steps = [StepTime((2 + n + n * 10 / 100) * scale, n, n * 10) for n in range(1, len(turns) + 1)]
    steps = [attrs.evolve(step, n_tokens=step.n_tokens + 50 * (step.n_rows % 2)) for step in steps]
    steps = [
        attrs.evolve(step, ms=(2 + step.n_rows + step.n_tokens / 100) * scale) for step in steps
    ]
    served = [Served(turn, steps=[number]) for number, turn in enumerate(turns)]
    return Played("all", 1.0, served, steps, {}, 0, 0.0, 0, 0, [], [])


def test_step_times_are_compared_at_equal_batch() -> None:
    turns = [Turn(number, 0, 0.0, b"", b"") for number in range(6)]
    change = change_at_equal_batch(played(1.05, turns), played(1.0, turns))
    assert change is not None
    assert change.mean == pytest.approx(0.05, abs=1e-4)
    assert change.low <= change.mean <= change.high
    assert change_at_equal_batch(played(1.0, turns[:2]), played(1.0, turns)) is None


def test_prompts_grow_and_arrivals_are_the_same_every_time() -> None:
    tokens = fresh_tokens(TINY)
    assert tokens != fresh_tokens(TINY)
    turns = turns_of(TINY, tokens, (0.1, 0.2, 0.3))
    again = turns_of(TINY, fresh_tokens(TINY), (0.1, 0.2, 0.3))
    assert [turn.arrival_s for turn in turns] == [turn.arrival_s for turn in again]
    assert len({turn.rid for turn in turns}) == len(turns)
    by_rid = {turn.rid: turn for turn in turns}
    for turn in turns:
        if turn.round:
            before = by_rid[f"c{turn.conversation}r{turn.round - 1}"]
            assert turn.tokens.startswith(before.tokens + before.output)


def test_a_page_has_one_fingerprint_wherever_it_lies() -> None:
    layout = TINY.layout
    memory = LayeredMemory.allocate(layout, 5)
    shape = (layout.n_slices, 3 * layout.page_tokens, layout.n_kv_heads, layout.head_dim)
    kv = torch.randn(shape)
    words = words_of_kv(kv, layout.page_tokens)
    target = words_of_memory(memory)
    prints = Fingerprints(layout.n_slices, layout.slice_bytes // 8, kv.device)
    target[:, [4, 0]] = words[:, 1:3]
    assert torch.equal(prints.of(target[:, [4, 0]]), prints.of(words[:, 1:3]))
    target[1, 4, 7] ^= 1
    assert prints.of(target[:, [4]]) != prints.of(words[:, 1:2])
    swapped = words[:, 1:2].clone()
    swapped[0], swapped[1] = words[1, 1:2], words[0, 1:2]
    assert prints.of(swapped) != prints.of(words[:, 1:2])


def test_paged_attention_is_attention_over_the_pages_tokens() -> None:
    q, k, v = torch.randn(1, 4, 8), torch.randn(96, 2, 8), torch.randn(96, 2, 8)
    table = torch.tensor([[5, 0, 3]], dtype=torch.int32)
    lengths = torch.tensor([40], dtype=torch.int32)
    places = torch.cat([torch.arange(p * 16, p * 16 + 16) for p in (5, 0, 3)])[:40]
    truth = prefill_attention_plain(q, k[places], v[places])
    assert torch.allclose(paged_plain(q, k, v, table, lengths, 16), truth, atol=1e-6)


def test_the_checksum_is_zlibs_whoever_computes_it() -> None:
    data = np.random.default_rng().integers(0, 256, 100_001, dtype=np.uint8).tobytes()
    assert crc32(data) == zlib.crc32(data)
    assert crc32(data[100:], crc32(data[:100])) == zlib.crc32(data)


def test_a_machine_is_told_in_plain_words_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's version is a string of its own kind, which no JSON encoder knows."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    told = machine()
    assert told["gpu"] == "2 x a GPU"
    assert {type(value) for value in told.values()} == {str, int}


@pytest.mark.parametrize(
    ("value", "short"),
    [(19750.83, "19,751"), (1000.4, "1,000"), (999.94, "999.9"), (53.27, "53.27"), (0.0, "0")],
)
def test_a_figure_is_short_and_has_no_exponent(value: float, short: str) -> None:
    assert in_short(value) == short
