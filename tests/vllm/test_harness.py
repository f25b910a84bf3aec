"""What the comparisons with vLLM rest on; runs without vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from benches import vllm_step_time, vllm_tables
from benches.vllm_side_by_side import (
    Conversations,
    Place,
    SetUp,
    Turn,
    ideal_bytes,
    phases,
    schedule,
    summary,
)
from tests.vllm.harness import GENTLE, INSIDE, Server
from tests.vllm.harness_client import Answer, Script, _Reader, difference
from tests.vllm.harness_model import SMALL, TINY, write_model

ANSWER = Answer(
    tokens=(5, 6),
    logprobs=({5: -0.5, 7: -1.0}, {6: -0.1, 7: -3.0}),
    n_cached=0,
    ttft_s=0.1,
    token_gaps_s=(0.01,),
    finish_reason="length",
)


def with_(answer: Answer, step: int, logprobs: dict[int, float], token: int) -> Answer:
    changed = list(answer.logprobs)
    changed[step] = logprobs
    tokens = (*answer.tokens[:step], token, *answer.tokens[step + 1 :])
    return attrs.evolve(answer, logprobs=tuple(changed), tokens=tokens)


def test_the_difference_of_two_answers_is_that_of_their_worst_step() -> None:
    assert difference(ANSWER, ANSWER) == 0
    other = with_(ANSWER, 1, {6: -0.1, 7: -3.25}, 6)
    assert difference(ANSWER, other) == 0.25


def test_answers_that_go_apart_are_far_apart_unless_two_tokens_were_equally_likely() -> None:
    assert difference(ANSWER, with_(ANSWER, 0, {7: -0.2, 5: -0.5}, 7)) == float("inf")
    assert difference(ANSWER, attrs.evolve(ANSWER, tokens=(5,))) == float("inf")
    one = with_(ANSWER, 0, {5: -0.5, 7: -0.50001}, 5)
    other = with_(with_(one, 0, {5: -0.5, 7: -0.50001}, 7), 1, {9: -9.0}, 9)
    assert difference(one, other) < 1e-4


def test_a_stream_becomes_an_answer() -> None:
    reader = _Reader(0.0)
    choice = {"token_ids": [5], "logprobs": {"top_logprobs": [{"token_id:5": -0.5}]}}
    reader.read("data: " + json.dumps({"choices": [choice]}))
    usage = {"prompt_tokens_details": {"cached_tokens": 128}}
    last = {"choices": [{"token_ids": [], "finish_reason": "length"}], "usage": usage}
    reader.read("data: " + json.dumps(last))
    reader.read("data: [DONE]")
    found = reader.answer()
    assert (found.tokens, found.logprobs, found.n_cached) == ((5,), ({5: -0.5},), 128)
    assert found.finish_reason == "length"
    with pytest.raises(RuntimeError, match="the server says no"):
        reader.read('data: {"error": "no"}')
    with pytest.raises(RuntimeError, match="without a token"):
        _Reader(0.0).answer()


def test_a_prompt_is_all_that_was_said_before_and_the_users_new_words() -> None:
    script = Script(turns=((1, 2), (3,)), n_answer=2)
    assert script.prompt(0, []) == [1, 2]
    assert script.prompt(1, [ANSWER]) == [1, 2, 5, 6, 3]
    assert Script.drawn(1) == Script.drawn(1) != Script.drawn(2)


def test_steps_are_read_from_the_log(tmp_path: Path) -> None:
    log = tmp_path / "one.log"
    line = (
        "Iteration({}): {} context requests, {} context tokens, {} generation requests, {}"
        " generation tokens, iteration elapsed time: {} ms, CPU KV cache usage: 0.2%\n"
    )
    log.write_text(line.format(0, 1, 600, 0, 0, "99.50") + line.format(1, 0, 0, 1, 1, "1.25"))
    server = Server(name="one", command=[], port=1, log=log)
    assert [(it.n_prompt_tokens, it.ms) for it in server.steps()] == [(600, 99.5), (0, 1.25)]
    assert server.step_times_ms() == [1.25]


def test_a_model_is_the_same_every_time(tmp_path: Path) -> None:
    one, two = write_model(tmp_path / "one"), write_model(tmp_path / "two")
    files = ["config.json", "model.safetensors"]
    assert [(one / it).read_bytes() for it in files] == [(two / it).read_bytes() for it in files]
    assert TINY.kv_bytes(128) == 262_144


def turn_of(name: str, n_round: int, turn: int, ttft_s: float, n_bytes: float) -> Turn:
    return Turn(
        place=Place(name, n_round, "in rotation", 0, turn),
        answer=attrs.evolve(ANSWER, ttft_s=ttft_s),
        bytes_from_p=n_bytes,
        ideal_bytes=1e6,
        steps_ms=(2.0, 4.0),
        n_by_source=dict.fromkeys(("device", "host", "disk", "p2p"), 128.0),
    )


def test_turns_become_medians_and_a_table() -> None:
    turns = [
        turn_of(name, n_round, turn, ttft_s, n_bytes)
        for name, n_bytes in (("single", 0.0), ("kvlift", 2e6))
        for turn in (1, 2)
        for n_round, ttft_s in ((1, 0.1), (2, 0.3))
    ]
    played = summary(turns, ["single", "kvlift"])
    (part,) = played
    assert part["rows"][1]["ttft_ms"] == [200.0, 200.0]
    assert part["rows"][1]["ttft_ms_by_round"] == [100.0, 300.0]
    assert part["rows"][1]["n_steps"] == 8
    result = {
        "played": played,
        "script": {"n_turns": 2, "n_first": 9, "n_next": 3, "n_answer": 2, "n_conversations": 1},
        "blocks": {"decode": 4, "prefill": 8},
        "block_bytes": 1e6,
        "n_rounds": 2,
        "n_nixl_threads": 1,
    }
    table = "\n".join(vllm_tables.side_by_side_table(result))
    assert "| kvlift | 200 | 200 | 2.0 MB (suffix alone: 1.0) | 3.0 ms |" in table
    assert "| no connector, one instance | 200 | 200 | - | 3.0 ms |" in table
    assert "median of 2:" in table
    assert "no connector, one instance 3.00, kvlift 3.00" in table


def test_an_answer_is_compared_with_the_first_one_to_the_same_prompt() -> None:
    other = with_(ANSWER, 1, {6: -0.1, 7: -3.25}, 6)
    turns = [turn_of(name, 1, 1, 0.1, 0.0) for name in ("single", "kvlift")]
    turns.append(attrs.evolve(turn_of("kvlift", 2, 1, 0.1, 0.0), answer=other))
    turns.append(attrs.evolve(turn_of("single", 2, 1, 0.1, 0.0), answer=other))
    (part,) = summary(turns[:2], ["single", "kvlift"])
    assert [it["logprob_diff_max"] for it in part["rows"]] == [0, 0]
    (part,) = summary(turns, ["single", "kvlift"])
    assert [it["logprob_diff_max"] for it in part["rows"]] == [0.25, 0.25]


def test_every_second_round_goes_back() -> None:
    assert phases("ABC", 2) == [(1, "A"), (1, "B"), (1, "C"), (2, "C"), (2, "B"), (2, "A")]


def test_all_set_ups_are_asked_the_same_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[list[int]] = []

    def asked(place: Place, to: SetUp, prompt: list[int], n_answer: int, ideal: float) -> Turn:
        prompts.append(prompt)
        token = len(prompts)  # no two answers are equal
        found = turn_of(place.name, place.n_round, place.turn, 0.1, ideal)
        return attrs.evolve(found, answer=attrs.evolve(ANSWER, tokens=(token, token)))

    monkeypatch.setattr("benches.vllm_side_by_side.asked", asked)
    scripts = [Script(turns=((1,), (2,), (3,)), n_answer=2)] * 2
    all_asked = Conversations({"one at a time": scripts[:1], "in rotation": scripts[1:]})
    server = Server(name="one", command=[], port=1, log=Path("none"))
    for name in ("single", "kvlift"):
        up = SetUp(name, server.url, server, ())
        assert len(list(all_asked.played(1, up))) == all_asked.n_requests == 6
    assert prompts[:6] == prompts[6:]
    assert prompts[2] == [1, 1, 1, 2, 2, 2, 3]


def test_conversations_take_turns_or_come_one_after_the_other() -> None:
    scripts = [Script(turns=((1,), (2,)), n_answer=1)] * 2
    assert list(schedule(scripts, in_rotation=False)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert list(schedule(scripts, in_rotation=True)) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert ideal_bytes(SMALL, [0] * 300, 130) == SMALL.kv_bytes(172)


def test_steps_are_compared_pair_by_pair() -> None:
    sample = vllm_step_time.Sample
    samples = [
        sample("single", (1.0, 2.0, 3.0), 10.0),
        sample("kv_both", (2.2, 2.2, 2.2), 20.0),
    ]
    assert vllm_step_time.paired(samples, ["single", "kv_both"]) == {"step": 1.1, "prompt": 2.0}
    rows = [vllm_step_time.row([it]) for it in samples]
    result = {"rows": rows, "ratio": {"step": 1.1, "prompt": 2.0}, "script": {}}
    result["script"] = {"n_prompt": 9, "n_answer": 3}
    assert "| no connector | 2.00 ms | 10.0 ms |" in vllm_tables.step_table(result)


def test_a_yield_sleeps_only_where_it_is_told_to() -> None:
    def name_of_yield(more: dict[str, str]) -> str:
        env = {**os.environ, "PYTHONPATH": str(INSIDE), **more}
        command = [sys.executable, "-c", "import os; os.sched_yield(); print(os.sched_yield)"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return done.stdout

    assert "_sleep_a_little" in name_of_yield(GENTLE)
    assert "built-in" in name_of_yield({})
