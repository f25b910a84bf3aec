"""What kvlift costs a vLLM instance that hits nothing: its steps against those without a connector.

    python benches/vllm_step_time.py [--json]

Two instances are up at the same time, one with kvlift's host and storage tiers (`kv_both`), one
without a connector. They are asked the same fresh prompts, one instance after the other, in an
order that turns with every prompt. The times of the engine's steps are vLLM's own
(`--enable-logging-iteration-details`); steps that compute a prompt are counted apart. Needs the
environment of `make test-vllm`, about 4 GB of memory and some minutes.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benches.vllm_side_by_side import facts  # noqa: E402
from tests.vllm.harness import Server, Sizes, Step, running, server, vllm_python  # noqa: E402
from tests.vllm.harness_client import Client, Script  # noqa: E402
from tests.vllm.harness_model import SMALL, write_model  # noqa: E402
from tests.vllm.harness_pairs import kvlift_both  # noqa: E402


@attrs.frozen
class Sample:
    """The steps of one instance for one prompt."""

    name: str
    decode_ms: tuple[float, ...]
    prompt_ms: float


def sampled(name: str, to: Server, prompt: Sequence[int], n_answer: int) -> Sample:
    n_before = len(to.steps())
    Client(to.url).complete(prompt, n_answer)
    steps: list[Step] = to.steps()[n_before:]
    decode = tuple(step.ms for step in steps if not step.n_prompt_tokens)
    return Sample(name, decode, sum(step.ms for step in steps if step.n_prompt_tokens))


def row(samples: Sequence[Sample]) -> dict[str, Any]:
    steps = [ms for it in samples for ms in it.decode_ms]
    return {
        "instance": samples[0].name,
        "step_ms": round(statistics.median(steps), 4),
        "prompt_ms": round(statistics.median(it.prompt_ms for it in samples), 3),
        "n_steps": len(steps),
        "n_prompts": len(samples),
    }


def paired(samples: Sequence[Sample], names: Sequence[str]) -> dict[str, float]:
    """Medians of the ratios of neighbours: the same prompt, one moment after the other."""
    mine = [it for it in samples if it.name == names[1]]
    others = [it for it in samples if it.name == names[0]]
    steps = [
        statistics.median(a.decode_ms) / statistics.median(b.decode_ms)
        for a, b in zip(mine, others, strict=True)
    ]
    prompts = [a.prompt_ms / b.prompt_ms for a, b in zip(mine, others, strict=True)]
    return {
        "step": round(statistics.median(steps), 4),
        "prompt": round(statistics.median(prompts), 4),
    }


def measured(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    known = facts()
    sizes = Sizes(write_model(folder / "model", SMALL), max_len=2048, n_blocks=chosen.blocks)
    storage = str(folder / "kv")
    single = server("single", sizes, folder)
    both = kvlift_both(sizes, folder, host_bytes=1 << 29, storage=storage)
    order = [("single", single), ("kv_both", both)]
    names = [name for name, _server in order]
    began = time.monotonic()
    samples: list[Sample] = []
    with running(single, both):
        for seed in range(chosen.prompts + 2):
            script = Script.drawn(1000 + seed, n_turns=1, n_first=chosen.tokens)
            found = [sampled(name, to, script.turns[0], chosen.answer) for name, to in order]
            samples += found if seed >= 2 else []
            order.reverse()
            print(f"prompt {seed + 1}", file=sys.stderr)
        hits = both.counter("vllm:external_prefix_cache_hits_total")
    return {
        "bench": "vllm-step-time",
        **known,
        "model": attrs.asdict(SMALL),
        "script": {"n_prompt": chosen.tokens, "n_answer": chosen.answer},
        "tokens_hit": hits,
        "seconds": round(time.monotonic() - began),
        "rows": [row([it for it in samples if it.name == name]) for name in names],
        "ratio": paired(samples, names),
    }


def shown(result: Mapping[str, Any]) -> str:
    lines = [
        f"{it['instance']:8} step {it['step_ms']:.3f} ms, prompt {it['prompt_ms']:.1f} ms,"
        f" {it['n_steps']} steps"
        for it in result["rows"]
    ]
    ratio = result["ratio"]
    return "\n".join([*lines, f"ratio    step {ratio['step']:.3f}, prompt {ratio['prompt']:.3f}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=520, help="of each prompt")
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=64)
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
