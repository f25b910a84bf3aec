"""Feeds what comes from outside with inputs that are wrong in many ways.

    python -m tests.fuzz wire --inputs 1000000 --seed 1 --json
    python -m tests.fuzz all --inputs 1000000

Each surface is fed in a process of its own, by three engines: a seeded grammar, the same grammar
under hypothesis (which shrinks what it finds), and atheris where it is installed.
"""

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from kvlift.cli.benches.row import machine
from kvlift.cli.output import progress_bar
from tests.fuzz import guided
from tests.fuzz.harness import Meter, bound_memory, by_grammar, by_hypothesis
from tests.fuzz.surfaces import GUIDED, SURFACES, surface_of

GUIDED_SHARE: Final = 0.3
HYPOTHESIS_SHARE: Final = 0.02
N_HYPOTHESIS_MAX: Final = 10_000
N_SOCKETS_MAX: Final = 2_000
WORST: Final = ("peak_rss_mib", "peak_rss_growth_mib")


def shares(name: str, n_inputs: int) -> dict[str, int]:
    """How many inputs each engine makes; in total `n_inputs`."""
    n_hypothesis = min(int(n_inputs * HYPOTHESIS_SHARE), N_HYPOTHESIS_MAX)
    n_guided = int(n_inputs * GUIDED_SHARE) if name in GUIDED and guided.is_there() else 0
    n_sockets = min(n_inputs // 50, N_SOCKETS_MAX) if name == "http" else 0
    return {
        "grammar": n_inputs - n_hypothesis - n_guided - n_sockets,
        "hypothesis": n_hypothesis,
        "atheris": n_guided,
        "sockets": n_sockets,
    }


def fuzzed(name: str, n_inputs: int, seed: int, step: Callable[[], None]) -> dict[str, Any]:
    """One surface, all its engines; in this process and that of atheris."""
    n_of = shares(name, n_inputs)
    parts: dict[str, dict[str, Any]] = {}
    if n_of["atheris"]:
        parts["atheris"] = guided.by_coverage(name, n_of["atheris"], seed)
    surface = surface_of(name)
    logging.disable(logging.CRITICAL)
    bound_memory()
    try:
        for engine, feed in (("grammar", by_grammar), ("hypothesis", by_hypothesis)):
            meter = Meter(surface)
            feed(meter, n_of[engine], seed, step)
            parts[engine] = meter.report()
    finally:
        surface.close()
    if n_of["sockets"]:
        parts["sockets"] = _through_sockets(n_of["sockets"], seed, step)
    return summed(name, seed, parts)


def _through_sockets(n_inputs: int, seed: int, step: Callable[[], None]) -> dict[str, Any]:
    from tests.fuzz.sockets import SocketSurface

    surface = SocketSurface()
    try:
        meter = Meter(surface)
        by_grammar(meter, n_inputs, seed, step)
    finally:
        surface.close()
    return meter.report()


def summed(name: str, seed: int, parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One report of all engines' reports."""
    outcomes: Counter[str] = Counter()
    for part in parts.values():
        outcomes.update(part["outcomes"])
    slowest = max(parts.values(), key=lambda part: float(part["slowest_ms"]))
    seconds = sum(part["seconds"] for part in parts.values())
    cpu_seconds = sum(part["cpu_seconds"] for part in parts.values())
    n_inputs = sum(part["inputs"] for part in parts.values())
    return {
        "surface": name,
        "seed": seed,
        "inputs": n_inputs,
        "engines": {engine: part["inputs"] for engine, part in parts.items()},
        "outcomes": dict(sorted(outcomes.items())),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "inputs_per_cpu_second": round(n_inputs / max(cpu_seconds, 0.1)),
        **{key: max(part[key] for part in parts.values()) for key in WORST},
        **{key: slowest[key] for key in ("slowest_ms", "slowest_input_bytes", "slowest_input")},
        "failures": [failure for part in parts.values() for failure in part["failures"]],
    }


def _in_its_own_process(name: str, n_inputs: int, seed: int) -> dict[str, Any]:
    options = [name, "--inputs", str(n_inputs), "--seed", str(seed), "--json"]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *options],
        stdout=subprocess.PIPE,
        check=False,
        cwd=guided.ROOT,
    )
    if not ended.stdout:
        raise click.ClickException(f"{name} ended with {ended.returncode}")
    answer: dict[str, Any] = msgspec.json.decode(ended.stdout)
    return answer


@click.command()
@click.argument("surface", type=click.Choice([*SURFACES, "all"]))
@click.option("--inputs", "n_inputs", type=click.IntRange(1), default=10_000, help="In total.")
@click.option("--seed", type=click.IntRange(0), default=1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value and nothing else.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the JSON value here, too.")
def main(surface: str, n_inputs: int, seed: int, *, as_json: bool, out: Path | None) -> None:
    """Feed SURFACE with many wrong inputs. Exit code 1 where something was found."""
    if not guided.is_there():
        click.echo(guided.NEEDED, err=True)
    answer: dict[str, Any]
    if surface == "all":
        os.nice(5)
        reports: list[dict[str, Any]] = []
        answer = {
            "bench": "fuzz",
            "machine": machine(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": f"python -m tests.fuzz all --inputs {n_inputs} --seed {seed}",
            "surfaces": reports,
        }
        for name in SURFACES:
            reports.append(_in_its_own_process(name, n_inputs, seed))
            _write(answer, out)
    else:
        with progress_bar() as bar:
            task = bar.add_task(surface, total=n_inputs)
            answer = fuzzed(surface, n_inputs, seed, lambda: bar.advance(task))
        reports = [answer]
        _write(answer, out)
    text = _text(answer)
    click.echo(text if as_json else "\n".join(map(_line, reports)))
    sys.exit(int(any(report["failures"] for report in reports)))


def _text(answer: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(answer), indent=1)


def _write(answer: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.write_bytes(_text(answer) + b"\n")


def _line(report: dict[str, Any]) -> str:
    found = "".join(f"\n  {each['error']}\n    {each['where']}" for each in report["failures"])
    memory = f"peak {report['peak_rss_mib']} MiB (+{report['peak_rss_growth_mib']})"
    speed = f"{report['inputs_per_cpu_second']:,} a second of processor time"
    return (
        f"{report['surface']}: {report['inputs']:,} inputs, {speed}, {memory}, "
        f"slowest {report['slowest_ms']} ms, {len(report['failures'])} found{found}"
    )


if __name__ == "__main__":
    main()
