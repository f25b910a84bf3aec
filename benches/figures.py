"""The tables of figures in the documents, rendered from committed results and nothing else.

    python benches/figures.py --check README.md      exit 1 where a table is not what a file says
    python benches/figures.py --write README.md      render the tables again
    python benches/figures.py --keep FILE NAME       take a fresh result in as results/NAME.json

A document asks for a table by `<!-- figures:NAME -->` ... `<!-- /figures -->`, where NAME is that
of a file in `benches/results`. What `kvlift demo --json` prints can be kept as it is: `--keep` adds
the machine, the command (`--command`) and the commit where the result does not name them.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

if __package__:
    from benches import check_tables, ttft_tables, vllm_tables
else:  # run as a script: the folder itself is on the path
    import check_tables  # type: ignore[import-not-found,no-redef]
    import ttft_tables  # type: ignore[import-not-found,no-redef]
    import vllm_tables  # type: ignore[import-not-found,no-redef]

RESULTS: Final = Path(__file__).resolve().parent / "results"

_MARKED: Final = re.compile(
    r"(?P<open><!-- figures:(?P<name>[\w.-]+) -->\n)(?P<body>.*?)(?P<close><!-- /figures -->)",
    re.DOTALL,
)

Result = Mapping[str, Any]

COPIES: Final = (
    ("restore-8MiB", "restore, pages of 8 MiB (host to device)"),
    ("restore-1MiB", "restore, pages of 1 MiB"),
    ("writethrough-8MiB", "write-through, pages of 8 MiB (device to host)"),
    ("writethrough-1MiB", "write-through, pages of 1 MiB"),
    ("decode-beside-restore", "decode step beside a restore"),
    ("decode-beside-writethrough", "decode step beside a write-through"),
    ("storage-to-device-1GiB", "1 GiB from files in memory to the device"),
    ("storage-to-device-1GiB/tick-8ms", "the same, with a tick every 8 ms"),
    ("storage-to-device-1GiB/sequence", "the same, one after the other"),
)
"""Cases of the copies bench that a reader asks for, and what they are in words."""


def copies_table(result: Result) -> list[str]:
    """Rates against one contiguous pinned copy; steps against the step alone."""
    row_by_case = {row["case"]: row for row in result["rows"]}
    lines = ["| case | measured | ceiling of the same run | ratio |", "|---|---|---|---|"]
    for case, words in COPIES:
        row = row_by_case.get(case)
        if row is None:
            continue
        if case.startswith("storage"):
            value, ceiling = f"{row['value']:.1f} ms", f"{row['ceiling']:.1f} ms, the slower stage"
            lines.append(f"| {words} | {value} | {ceiling} | {row['ratio']:.2f} of it |")
        elif row["unit"] == "ms":
            ceiling = f"{row['beside_plain_ms']:.3f} ms beside a plain copy"
            value = f"{row['value']:.3f} ms, alone {row['alone_ms']:.3f} ms"
            lines.append(f"| {words} | {value} | {ceiling} | {row['ratio']:.2f} of alone |")
        else:
            value, ceiling = (f"{row[key]:.1f} {row['unit']}" for key in ("value", "ceiling"))
            lines.append(f"| {words} | {value} | {ceiling} | {row['ratio']:.2f} |")
    return lines


MODES: Final = (("none", "none"), ("device", "device"), ("host", "device + host"), ("all", "all"))


def demo_table(result: Result) -> list[str]:
    """One row a mode; changes are against the mode without a decode-side cache."""
    modes = result["modes"]
    none = modes.get("none")
    sources = "prompt tokens from device / host / storage / peer"
    lines = [
        f"| tiers | TTFT mean | p90 | p99 | TPOT mean | {sources} | sent by prefill |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, words in MODES:
        if key not in modes:
            continue
        mode = modes[key]
        base = none if key != "none" else None
        ttft = [_ms(mode, base, "ttft_ms", part) for part in ("mean", "p90", "p99")]
        hit = " / ".join(f"{mode['hit'][tier]:,}" for tier in ("device", "host", "storage", "peer"))
        tpot = _ms(mode, base, "tpot_ms", "mean")
        sent = f"{mode['bytes_from_peer'] / 1e6:,.1f} MB"
        lines.append(f"| {words} | {' | '.join(ttft)} | {tpot} | {hit} | {sent} |")
    return [*lines, "", _verdict_of_demo(result)]


def _ms(mode: Result, base: Result | None, figure: str, part: str) -> str:
    value = mode[figure][part]
    if value is None:
        return "none"
    if base is None or not base[figure][part]:
        return f"{value:.1f} ms"
    return f"{value:.1f} ms ({100 * (value / base[figure][part] - 1):+.0f} %)"


def _verdict_of_demo(result: Result) -> str:
    """What the run has checked; a run that did not hold says so in the document as well."""
    modes = result["modes"].values()
    n_requests = sum(mode["requests"] for mode in modes)
    n_failed = sum(mode["failed"] for mode in modes)
    same = "the same in all modes" if result["tokens_identical"] else "DIFFERENT between modes"
    played = (
        f"{result['workload']}; model {result['model']} on {result['device']}, "
        f"{result['ranks']} decode ranks, a link of {result['link_gbps']:g} Gb/s."
    )
    return (
        f"{played} {n_requests} requests, {n_failed} failed; tokens {same}; "
        f"log-probabilities within {vllm_tables.rounded_up(result['logprob_diff_max'])}; "
        f"{result['pages_verified']} restored pages compared with recomputed ones; "
        f"at most {result['ballots_per_tick_max']} reduction a tick; "
        f"{result['leaks']} pages leaked." + "".join(f" NOT SO: {it}." for it in result["faults"])
    )


def machine_line(result: Result) -> str:
    """Machine, command and commit: a figure without them is not shown."""
    machine = result["machine"]
    if isinstance(machine, str):
        machine = {"machine": machine}
    said = ", ".join(
        str(value) if key in {"gpu", "machine"} else f"{key} {value}"
        for key, value in _shown(machine)
    )
    commit = result["commit"]
    of = "" if commit == "none" else f", commit {commit[:12]}"
    return f"Measured with `{result['command']}` on {said}{of}."


def _shown(machine: Mapping[str, Any]) -> list[tuple[str, Any]]:
    names = {"n_cpus": "CPU cores"}
    return [(names.get(key, key), value) for key, value in machine.items()]


def rendered(name: str, results: Path = RESULTS) -> str:
    """The table of one result file. Raises ValueError with a sentence."""
    path = results / f"{name}.json"
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"there is no result {name!r} in benches/results: {error}") from None
    table = renderer_of(name, result)
    try:
        return "\n".join([*table(result), "", machine_line(result)]) + "\n"
    except KeyError as error:
        raise ValueError(f"benches/results/{name}.json has no field {error}") from None


def renderer_of(name: str, result: Result) -> Callable[[Result], list[str]]:
    if "modes" in result:
        return demo_table
    if "edges_total" in result:
        return check_tables.worlds_table
    if result.get("bench") == "copies":
        return copies_table
    if result.get("bench") == "fuzz":
        return check_tables.fuzz_table
    if result.get("bench") == "ttft":
        return ttft_tables.ttft_table
    if result.get("bench") == "vllm-side-by-side":
        return vllm_tables.side_by_side_table
    if result.get("bench") == "vllm-step-time":
        return vllm_tables.step_table
    raise ValueError(
        f"benches/results/{name}.json is neither a demo, a check nor a bench with a table"
    )


def redrawn(text: str, results: Path = RESULTS) -> str:
    """The document with all its tables rendered from the files. Raises ValueError."""
    return _MARKED.sub(
        lambda match: f"{match['open']}{rendered(match['name'], results)}{match['close']}", text
    )


def names_in(text: str) -> list[str]:
    return [match["name"] for match in _MARKED.finditer(text)]


def keep(source: Path, name: str, command: str, results: Path = RESULTS) -> Path:
    """Take a fresh result in, with what it does not say about itself. Raises ValueError."""
    result = json.loads(source.read_text(encoding="utf-8"))
    facts = {"machine": _machine(), "command": command, "commit": _commit()}
    result = {**facts, **dict(result)}
    path = results / f"{name}.json"
    renderer_of(name, result)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def _machine() -> dict[str, object]:
    import torch

    return {
        "n_cpus": os.cpu_count(),
        "CPU": _cpu_model(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _commit() -> str:
    asked = ["git", "-C", str(RESULTS), "rev-parse", "HEAD"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "none"


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", nargs="+", type=Path, metavar="DOCUMENT")
    what.add_argument("--write", nargs="+", type=Path, metavar="DOCUMENT")
    what.add_argument("--keep", nargs=2, metavar=("FILE", "NAME"))
    parser.add_argument("--command", default="kvlift demo --json", help="what made the result")
    chosen = parser.parse_args(args)
    try:
        if chosen.keep:
            print(keep(Path(chosen.keep[0]), chosen.keep[1], chosen.command))
            return 0
        n_stale = 0
        for document in chosen.check or chosen.write:
            before = document.read_text(encoding="utf-8")
            after = redrawn(before)
            n_stale += before != after
            if chosen.write:
                document.write_text(after, encoding="utf-8")
            elif before != after:
                print(f"{document} shows other figures than benches/results: run --write")
    except (OSError, TypeError, ValueError) as error:
        print(f"figures: {error}", file=sys.stderr)
        return 2
    return int(bool(chosen.check) and n_stale > 0)


if __name__ == "__main__":
    sys.exit(main())
