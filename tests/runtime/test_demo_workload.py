"""What the demo plays, how it compares, and what it tells, without any process."""

import json
import re
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from attrs import evolve

from kvlift.cli.main import main
from kvlift.runtime.demo.compare import Comparison, compare
from kvlift.runtime.demo.float32 import in_float32
from kvlift.runtime.demo.page import short_rows, write_report
from kvlift.runtime.demo.play import ModeRun, Played, Player, Setup, shown_of
from kvlift.runtime.demo.result import DemoResult, faults_of, leaks_of, result_of
from kvlift.runtime.demo.timeline import timeline_of
from kvlift.runtime.demo.trace import (
    TraceError,
    block_tokens_of,
    page_tokens_of,
    prompt_tokens,
    read_trace,
    trace_workload,
)
from kvlift.runtime.demo.workload import DemoRefused, Turn, Workload, conversations, prompt_of
from kvlift.runtime.worker.gathering import Generation
from kvlift.runtime.worker.generation import CachedTokens, EngineDownError, Request
from kvlift.runtime.worker.launch import Cluster
from kvlift.runtime.worker.loading import ModelSource
from kvlift.runtime.worker.model import Decoder


def request(**fields: Any) -> dict[str, Any]:
    plain = {"timestamp": 0, "input_length": 1100, "output_length": 40, "hash_ids": [0, 1, 2]}
    return plain | fields


def trace_of(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


# Conversations.


def chat(**fields: int) -> Workload:
    return conversations(**{"n_conversations": 3, "n_rounds": 4, "vocab": 100, "seed": 0} | fields)


def test_every_conversation_takes_a_turn_in_every_round_and_the_flush_is_half_way() -> None:
    workload = chat()
    assert [len(act) for act in workload.acts] == [3, 3, 3, 3]
    assert workload.rounds_after_flush == {3, 4}
    assert len({turn.name for turn in workload.turns}) == 12


def test_a_seed_means_the_same_tokens_and_another_seed_others() -> None:
    assert chat().acts == chat().acts
    assert chat(seed=1).turns[0].new_tokens != chat().turns[0].new_tokens


def test_conversations_share_their_instructions_and_nothing_else() -> None:
    one, two, _ = chat().acts[0]
    assert one.new_tokens[:48] == two.new_tokens[:48]
    assert one.new_tokens[48:] != two.new_tokens[48:]


def test_a_prompt_is_the_history_and_what_is_new() -> None:
    turn = chat().acts[1][2]
    assert prompt_of(turn, {2: (7, 8)}) == (7, 8, *turn.new_tokens)
    assert prompt_of(turn, {0: (7, 8)}) == turn.new_tokens


def test_the_device_is_smaller_than_the_working_set_and_the_host_is_not() -> None:
    workload = chat(n_conversations=8)
    n_final = sum(n for turn, n in workload.lengths() if turn.round_number == 4)
    n_working = n_final // workload.page_tokens
    sizes = workload.sizes()
    assert sizes.device_pages < n_working < sizes.host_pages
    assert sizes.request_tokens_most == max(n for _, n in workload.lengths())


def test_one_long_request_fits_the_device_whatever_its_share() -> None:
    turn = Turn(name="a", round_number=1, new_tokens=(1,) * 1000, n_output=24)
    workload = Workload(what="one", page_tokens=16, acts=((turn,),), flush_before=1)
    assert workload.sizes().device_pages * 16 > 1024


def test_an_absurd_workload_is_refused_with_what_to_change() -> None:
    turn = Turn(name="a", round_number=1, new_tokens=(1,), n_output=1 << 30)
    workload = Workload(what="one", page_tokens=16, acts=((turn,),), flush_before=1)
    with pytest.raises(DemoRefused, match="play fewer requests or scale them down"):
        workload.sizes()


# Traces.


def test_the_first_requests_are_read_in_order_of_time_and_no_line_after_them(
    tmp_path: Path,
) -> None:
    late, early = request(timestamp=9), request(timestamp=3)
    path = trace_of(tmp_path, late, "", early, "{broken")
    assert [each.timestamp for each in read_trace(path, 2)] == [3, 9]
    with pytest.raises(TraceError, match="line 4 is not JSON"):
        read_trace(path, 3)


def test_a_trace_shorter_than_asked_is_played_whole(tmp_path: Path) -> None:
    assert len(read_trace(trace_of(tmp_path, request()), 60)) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("not json", "line 1 is not JSON"),
        ("[1, 2]", "Expected `object`, got `array`"),
        (b"\xff\xfe".decode("latin-1"), "line 1 is not JSON"),
        ({"timestamp": 0}, "missing required field `input_length`"),
        (request(timestamp="soon"), r"Expected `int`, got `str` - at `\$.timestamp`"),
        (request(timestamp=-1), "at `\\$.timestamp`"),
        (request(input_length=0), "at `\\$.input_length`"),
        (request(input_length=10**12), "at `\\$.input_length`"),
        (request(output_length=None), "at `\\$.output_length`"),
        (request(hash_ids=[0, -1, 2]), "at `\\$.hash_ids"),
        (request(hash_ids=[0, 1]), "1100 tokens are 3 blocks of 512, but hash_ids has 2"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, line: object, says: str) -> None:
    with pytest.raises(TraceError, match=says) as caught:
        read_trace(trace_of(tmp_path, line), 5)
    assert "trace.jsonl, line 1" in str(caught.value)


def test_an_endless_line_is_given_up_and_an_empty_file_too(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 1 is longer than"):
        read_trace(trace_of(tmp_path, "[" * (5 << 20)), 5)
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(trace_of(tmp_path, ""), 5)
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "nowhere", 5)


def test_equal_block_ids_are_equal_tokens_and_lengths_are_scaled(tmp_path: Path) -> None:
    lines = (request(), request(input_length=1024, hash_ids=[0, 9]), request(hash_ids=[0, 1, 7]))
    one, two, three = (
        prompt_tokens(each, scale=0.1, vocab=1000, seed=0)
        for each in read_trace(trace_of(tmp_path, *lines), 3)
    )
    block = block_tokens_of(0.1)
    assert (block, len(one), len(two)) == (51, 2 * 51 + 8, 102)
    assert one[:block] == two[:block]
    assert one[: 2 * block] == three[: 2 * block]
    assert one[2 * block :] != three[2 * block :]
    assert one[block : 2 * block] != two[block:]


@pytest.mark.parametrize(("scale", "page_tokens"), [(0.01, 5), (0.1, 51), (1.0, 64), (0.0001, 1)])
def test_pages_cut_blocks_evenly(scale: float, page_tokens: int) -> None:
    assert page_tokens_of(scale) == page_tokens
    assert block_tokens_of(scale) % page_tokens == 0


def workload_of(path: Path, **fields: Any) -> Workload:
    plain = {"n_requests": 60, "scale": 0.01, "vocab": 1000, "positions_max": 4096, "seed": 0}
    return trace_workload(path, **plain | fields)


def test_a_trace_keeps_its_times_and_is_flushed_half_way(tmp_path: Path) -> None:
    lines = [request(timestamp=1000 * i, output_length=0) for i in range(12)]
    workload = workload_of(trace_of(tmp_path, *lines))
    assert [[turn.delay_s for turn in act] for act in workload.acts] == [[0, 1, 2, 3, 4, 5]] * 2
    assert [turn.round_number for turn in workload.turns] == [i for i in range(1, 7) for _ in "ab"]
    assert workload.rounds_after_flush == {4, 5, 6}
    assert {turn.n_output for turn in workload.turns} == {1}


def test_shared_prefixes_of_a_trace_count_once(tmp_path: Path) -> None:
    lines = [request(timestamp=i) for i in range(10)]
    sizes = workload_of(trace_of(tmp_path, *lines)).sizes()
    assert sizes.device_pages == 3 + 16
    assert sizes.host_pages == 2 * (2 + 10) + 3 + 16


def test_a_request_too_long_for_the_model_says_to_scale_down(tmp_path: Path) -> None:
    with pytest.raises(
        DemoRefused, match=r"request 1 .* the model takes 8; give a smaller --scale"
    ):
        workload_of(trace_of(tmp_path, request()), positions_max=8)


# Comparing and telling.


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.set_num_threads(1)
    return ModelSource().decoder()


def played(decoder: Decoder, turn: Turn) -> Played:
    tokens, logprobs = list(turn.new_tokens), []
    for _ in range(turn.n_output):
        scores = torch.log_softmax(decoder.plain_forward(torch.tensor(tokens))[0][-1], dim=-1)
        tokens.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
    n_prompt = len(turn.new_tokens)
    return Played(
        turn=turn,
        prompt=turn.new_tokens,
        answer=tuple(tokens[n_prompt:]),
        logprobs=tuple(logprobs),
        cached=CachedTokens(host=16, storage=16),
        ttft_s=0.2,
        tpot_s=0.01,
        fault="",
    )


RANK: dict[str, Any] = {
    "leaks": 0,
    "n_pins": 0,
    "n_tickets": 0,
    "device": {"free": 60, "cached": 40, "owned": 0, "reserved": 0, "draining": 0},
    "host": {"free": 50, "cached": 50, "owned": 0, "reserved": 0, "draining": 0},
    "pages_verified": 2,
    "pages_wrong": 0,
    "pages_damaged": 0,
    "kv_diff_max": 1e-6,
    "ballots_per_tick_max": 1,
    "bytes_from_peer": 1000,
}

WORKLOAD = Workload(
    what="one request",
    page_tokens=16,
    acts=((Turn(name="only", round_number=1, new_tokens=(*range(40),), n_output=4),),),
    flush_before=0,
)


@pytest.fixture(scope="module")
def good(decoder: Decoder) -> ModeRun:
    return ModeRun(
        mode="all",
        device_pages=100,
        host_pages=100,
        played=(played(decoder, WORKLOAD.turns[0]),),
        ranks=(RANK, RANK),
        has_rested=True,
        timeline=None,
    )


def plain_run(good: ModeRun) -> ModeRun:
    [one] = good.played
    slower = evolve(one, cached=CachedTokens(), ttft_s=0.4)
    return evolve(good, mode="none", played=(slower,))


def found_in(runs: list[ModeRun], decoder: Decoder) -> Comparison:
    return compare(runs, decoder, lambda: None)


def test_a_run_like_the_plain_forward_holds(good: ModeRun, decoder: Decoder) -> None:
    runs = [plain_run(good), good]
    compared = found_in(runs, decoder)
    assert compared.tokens_identical
    assert compared.logprob_diff_max < 1e-4
    assert compared.n_compared == 2
    assert faults_of(runs, compared) == []


def test_another_token_a_wrong_logprob_and_no_number_at_all_are_found(
    good: ModeRun, decoder: Decoder
) -> None:
    [one] = good.played
    strange = evolve(one, answer=(*one.answer[:2], one.answer[2] ^ 1, one.answer[3]))
    compared = found_in([plain_run(good), evolve(good, played=(strange,))], decoder)
    assert not compared.tokens_identical
    assert compared.differences[0] == "mode all, only: token 3 is not the plain forward's"
    assert compared.differences[1] == "only differs between the modes none and all"
    for wrong in (one.logprobs[0] + 1e-3, float("nan")):
        off = evolve(one, logprobs=(wrong, *one.logprobs[1:]))
        compared = found_in([evolve(good, played=(off,))], decoder)
        assert compared.tokens_identical
        assert compared.logprob_diff_max > 1e-4
        assert "log-probabilities differ" in faults_of([good], compared)[0]


def test_nothing_answered_is_not_identical(good: ModeRun, decoder: Decoder) -> None:
    [one] = good.played
    none = evolve(good, played=(evolve(one, answer=(), logprobs=(), fault="only: lost"),))
    compared = found_in([none], decoder)
    assert not compared.tokens_identical
    assert any("1 requests failed: only: lost" in fault for fault in faults_of([none], compared))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"leaks": 1}, "2 pages, pins or tickets leaked"),
        ({"n_pins": 1}, "2 pages, pins or tickets leaked"),
        ({"device": {"free": 59, "cached": 40}}, "2 pages, pins or tickets leaked"),
        ({"pages_wrong": 1}, "2 of 4 restored pages differ"),
        ({"pages_verified": 0}, "no page was restored"),
        ({"ballots_per_tick_max": 2}, "2 ballots in one tick"),
    ],
)
def test_what_a_rank_reports_is_told(
    good: ModeRun, decoder: Decoder, change: dict[str, Any], says: str
) -> None:
    run = evolve(good, ranks=(RANK | change, RANK | change))
    [fault] = faults_of([run], found_in([run], decoder))
    assert says in fault
    assert leaks_of(good) == 0


def test_a_yardstick_that_reuses_and_storage_that_gives_nothing_are_told(
    good: ModeRun, decoder: Decoder
) -> None:
    compared = found_in([good], decoder)
    restless = evolve(good, has_rested=False)
    assert "still under way" in faults_of([restless], compared)[0]
    assert "no yardstick" in faults_of([evolve(good, mode="none")], compared)[0]
    empty = evolve(plain_run(good), mode="all")
    assert "nothing came from storage" in faults_of([empty], compared)[0]


def result_for(runs: list[ModeRun], decoder: Decoder) -> DemoResult:
    setup = Setup(
        n_ranks=2,
        model="tiny",
        seed=0,
        device="cpu",
        link_gbps=0.5,
        workload=WORKLOAD,
        sizes=WORKLOAD.sizes(),
    )
    return result_of(
        setup,
        runs,
        found_in(runs, decoder),
        model="tiny",
        machine="a <machine>",
        seconds=1.0,
        judged=lambda faults, _n_damaged: faults,
    )


def test_the_numbers_are_those_of_the_requests(good: ModeRun, decoder: Decoder) -> None:
    result = result_for([plain_run(good), good], decoder)
    mode = result.modes["all"]
    assert mode.ttft_ms.mean == mode.ttft_ms.p99 == pytest.approx(200)
    assert (mode.hit.host, mode.hit.storage, mode.hit.peer) == (16, 16, 8)
    assert mode.bytes_from_peer == 2000
    assert result.change_vs_none.ttft_mean == pytest.approx(-0.5)
    assert result.change_vs_none == result.change_vs_none_by_mode["all"]
    assert [row.is_after_flush for row in result.rounds] == [True, True]
    assert short_rows(result)[2][:2] == ("all", "200")
    alone = result_for([good], decoder)
    assert alone.change_vs_none.ttft_mean is None


def tick(number: int, **fields: Any) -> dict[str, Any]:
    decided = {"digest": ""} | {k: fields.pop(k) for k in ("effects", "notices") if k in fields}
    return {"line": "tick", "tick": number, "now_ns": number * 10**6, "decided": decided} | fields


def journal_of(folder: Path) -> Path:
    named = {"rid": "only", "attempt": 5}
    lines = [
        tick(1, calls=[{"Submit": {"rid": "other"}}]),
        tick(2, calls=[{"Submit": {"rid": "only"}}], effects=[["StartLookup", 9, 5, 0, 4]]),
        tick(3, reports=[{"LookupAnswered": {"ticket": 9, "n_pages": 2}}]),
        tick(
            4,
            notices=[{"WasPromised": named}],
            effects=[["StartPrefetch", 11, 5, 0, 2, 12], ["SendWant", 8, 5, 2, 1, 13]],
        ),
        tick(6, reports=[{"PrefetchEnded": {"ticket": 11, "n_pages": 2}}]),
        tick(7, reports=[{"RestoreEnded": {"ticket": 12, "n_pages": 2}}]),
        tick(9, reports=[{"PagesArrived": {"ticket": 8, "n_pages": 1}}]),
        tick(9, reports=[{"TokenArrived": {"ticket": 8, "token": 1, "logprob": -1.0}}]),
        tick(10, notices=[{"BecameReady": named}]),
        tick(20, notices=[{"HasEnded": named}]),
    ]
    return trace_of(folder, *lines)


def test_a_life_is_read_from_the_journal(tmp_path: Path) -> None:
    life = timeline_of(journal_of(tmp_path), "only")
    assert life is not None
    assert [(bar.row, bar.start_ms, bar.stop_ms, bar.n_pages) for bar in life.bars] == [
        ("wait for admission", 0, 2, 0),
        ("storage: look up", 0, 1, 2),
        ("storage → host", 2, 4, 2),
        ("host → device", 4, 5, 2),
        ("peer → device", 2, 7, 1),
        ("decode", 8, 18, 0),
    ]
    assert (life.first_token_ms, life.ready_ms) == (7, 8)


def test_a_journal_that_says_nothing_or_is_cut_short_is_no_fault(tmp_path: Path) -> None:
    assert timeline_of(tmp_path / "nowhere", "only") is None
    path = journal_of(tmp_path)
    assert timeline_of(path, "nobody") is None
    path.write_text(path.read_text()[:-40])
    assert timeline_of(path, "only") is not None


def test_the_report_is_one_file_that_needs_no_other_and_escapes(
    good: ModeRun, decoder: Decoder, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    result = result_for([plain_run(good), good], decoder)
    text = write_report(result, timeline_of(journal_of(tmp_path), "only"), tmp_path).read_text()
    assert text.count("<svg") == 3
    assert "currentColor" in text
    assert "a &lt;machine&gt;" in text
    assert not re.findall(r'(?:src|href)="(?!#)|url\((?!#)|@import|<script', text)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(#|href="#)([\w-]+)', text)) <= set(ids)


class DyingCluster:
    """Takes one act and is down afterwards."""

    def submit(self, _request: Request) -> Future[Generation]:
        future: Future[Generation] = Future()
        future.set_exception(EngineDownError("rank 1 was ended by SIGKILL"))
        return future

    def stats(self) -> dict[str, Any]:
        raise EngineDownError("rank 1 was ended by SIGKILL")


def test_a_worker_that_dies_is_told_and_not_a_crash(good: ModeRun, decoder: Decoder) -> None:
    player = Player(cast("Cluster", DyingCluster()), chat(), lambda: None)
    with pytest.raises(EngineDownError):
        player.play_all(damages=False)
    assert [one.fault for one in player.played] == [
        f"conversation {n}, round 1: rank 1 was ended by SIGKILL" for n in (1, 2, 3)
    ]
    run = evolve(
        good, played=tuple(player.played), ranks=(), has_rested=False, fault="rank 1 is gone"
    )
    result = result_for([run], decoder)
    assert result.modes["all"].failed == 3
    assert result.modes["all"].ttft_ms.mean is None
    assert "mode all ended early: rank 1 is gone" in result.faults
    assert short_rows(result)[1][1] == "–"


def test_the_request_with_most_sources_is_drawn(good: ModeRun) -> None:
    [one] = good.played
    turn = evolve(one.turn, name="poor")
    poor = evolve(one, turn=turn, cached=CachedTokens(device=16))
    setup = Setup(
        n_ranks=2,
        model="tiny",
        seed=0,
        device="cpu",
        link_gbps=0.0,
        workload=WORKLOAD,
        sizes=WORKLOAD.sizes(),
    )
    assert shown_of((poor, one), setup) == "only"


def test_a_model_in_16_bits_is_widened(tmp_path: Path) -> None:
    origin = tmp_path / "small"
    origin.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "vocab_size": 16,
        "dtype": "bfloat16",
    }
    (origin / "config.json").write_text(json.dumps(config))
    (origin / "model.safetensors").write_bytes(b"weights")
    wide = tmp_path / "wide"
    wide.mkdir()
    made = in_float32(str(origin), wide)
    assert ModelSource(str(origin)).config().dtype == "bfloat16"
    assert ModelSource(made).config().dtype == "float32"
    assert (Path(made) / "model.safetensors").read_bytes() == b"weights"
    assert in_float32("tiny", wide) == "tiny"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--modes", "none,tape"], "'tape' is no mode"),
        (["--modes", "none,device", "--corrupt-one-page"], "add host or all to --modes"),
        (["--trace", "nowhere.jsonl"], "does not exist"),
        (["--ranks", "3", "--out", "{out}"], "which 3 ranks cannot share"),
        (["--model", "nowhere", "--out", "{out}"], "nowhere"),
        (["--rounds", "1"], "--rounds"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(
    args: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [arg.format(out=tmp_path / "out") for arg in args]
    assert main(["demo", *filled]) == 2
    told = capsys.readouterr()
    assert says in told.err
    assert len(told.err.strip().splitlines()) == 1
    assert told.out == ""
