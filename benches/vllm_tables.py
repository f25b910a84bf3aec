"""The tables of the vLLM benches, for `benches/figures.py`."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

Result = Mapping[str, Any]

WORDS: Final = {"single": "no connector, one instance", "nixl": "NixlConnector", "kvlift": "kvlift"}


def side_by_side_table(result: Result) -> list[str]:
    """A row a set-up and way of playing: time to first token, bytes from prefill, decode step."""
    script, blocks = result["script"], result["blocks"]
    n_turns = script["n_turns"]
    turns = " | ".join(f"turn {turn + 1}" for turn in range(n_turns))
    lines: list[str] = []
    for part in result["played"]:
        n_medians = part["rows"][0]["n_prompts"] // n_turns
        lines += [
            f"Conversations {part['how']}; TTFT in ms, median of {n_medians}:",
            "",
            f"| | {turns} | from prefill, turns 2 to {n_turns} | engine step |",
            "|---|" + "---|" * (n_turns + 2),
        ]
        for row in part["rows"]:
            ttft = " | ".join(f"{value:.0f}" for value in row["ttft_ms"])
            sent = _sent(row)
            lines.append(
                f"| {WORDS[row['instance']]} | {ttft} | {sent} | {row['step_ms']:.1f} ms |"
            )
        lines.append("")
    worst = max(row["logprob_diff_max"] for part in result["played"] for row in part["rows"])
    block_mb = result["block_bytes"] / 1e6
    lines.append(
        f"{script['n_conversations']} conversations each way, {script['n_first']} + "
        f"{n_turns - 1} x {script['n_next']} tokens and {script['n_answer']} generated a turn; "
        f"decode has {blocks['decode']} blocks of {block_mb:.1f} MB, prefill {blocks['prefill']}. "
        f"Log-probabilities of all set-ups within {rounded_up(worst)} of the first one's."
    )
    if (n_rounds := result.get("n_rounds", 0)) > 0:
        lines.append(
            f"One set-up runs at a time: {', '.join(row['instance'] for row in _rows(result))}; "
            f"NIXL with {result['n_nixl_threads']} thread a side."
        )
    if n_rounds > 1:
        lines.append(_drift(result))
    return lines


def rounded_up(bound: float) -> str:
    """One digit that is not below the bound: 2.0027e-05 is within 3e-05."""
    digit, _, exponent = f"{bound:.0e}".partition("e")
    if float(f"{digit}e{exponent}") < bound:
        digit = str(int(digit) + 1)
    return f"{float(f'{digit}e{exponent}'):.0e}"


def _rows(result: Result) -> Sequence[Result]:
    rows: Sequence[Result] = result["played"][0]["rows"]
    return rows


def _drift(result: Result) -> str:
    """What the run says about its own machine: the last round against the first."""
    n_rounds = result["n_rounds"]
    ratios = [
        f"{part['how']}: "
        + ", ".join(
            f"{WORDS[row['instance']]} {row['ttft_ms_by_round'][-1] / first:.2f}"
            for row in part["rows"]
            if (first := row["ttft_ms_by_round"][0])
        )
        for part in result["played"]
    ]
    return (
        f"{n_rounds} rounds in alternating order; medians are over all of them. "
        f"TTFT of the last round as a multiple of the first; {'; '.join(ratios)}."
    )


def _sent(row: Result) -> str:
    sent, ideal = sum(row["bytes_from_p"][1:]) / 1e6, sum(row["ideal_bytes"][1:]) / 1e6
    return f"{sent:.1f} MB (suffix alone: {ideal:.1f})" if sent else "-"


def step_table(result: Result) -> list[str]:
    """Steps of an instance with kvlift's tiers that hit nothing, and of one without a connector."""
    lines = ["| | decode step, median | prompt, median |", "|---|---|---|"]
    words = {"single": "no connector", "kv_both": "kvlift, host and storage tiers, no hits"}
    lines += [
        f"| {words[row['instance']]} | {row['step_ms']:.2f} ms | {row['prompt_ms']:.1f} ms |"
        for row in result["rows"]
    ]
    ratio, script = result["ratio"], result["script"]
    said = (
        f"Median of the paired ratios: decode step {ratio['step']:.3f}, prompt "
        f"{ratio['prompt']:.3f} ({result['rows'][0]['n_prompts']} prompts of "
        f"{script['n_prompt']} tokens, {script['n_answer']} generated each)."
    )
    return [*lines, "", said]
