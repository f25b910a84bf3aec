"""The long simulation in chunks: one `kvlift simulate` after the other, merged into one result.

    python benches/simulate_deep.py OUT [--seeds 1000] [--chunk 100] [--ticks 2000] [--ranks 4]
    python benches/simulate_deep.py OUT --keep benches/results/simulate-deep.json

OUT keeps a file for each chunk; a chunk that is there is not played again, so that a run can be
stopped and gone on with. The result says that it was run in chunks, and over which core: the
digest is that of the files of `kvlift/core`. Chunks over different cores are not merged.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from kvlift.cli.benches.row import machine

ROOT: Final = Path(__file__).resolve().parents[1]
SUMS: Final = (
    "seeds", "ticks", "requests", "widened", "retracted", "failed_by_cache", "leaks",
    "divergences", "repeated", "virtual_seconds",
)  # fmt: skip
COUNTS: Final = ("ended", "hit", "faults")


def core_digest() -> str:
    """Of every file of the core, by name."""
    digest = sha256()
    for path in sorted((ROOT / "kvlift" / "core").glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def chunk_command(first: int, n_seeds: int, options: argparse.Namespace) -> list[str]:
    return [
        "simulate", "--seed", str(first), "--seeds", str(n_seeds), "--ticks", str(options.ticks),
        "--ranks", str(options.ranks), "--jobs", "1", "--json",
    ]  # fmt: skip


def play(options: argparse.Namespace) -> None:
    """Every chunk that is not there yet."""
    options.out.mkdir(parents=True, exist_ok=True)
    for first in range(0, options.seeds, options.chunk):
        path = options.out / f"chunk-{first}.json"
        if path.exists():
            continue
        command = chunk_command(first, min(options.chunk, options.seeds - first), options)
        began_s, core = time.time(), core_digest()
        done = subprocess.run(
            [sys.executable, "-m", "kvlift", *command], capture_output=True, cwd=ROOT, check=False
        )
        if done.returncode > 1:
            sys.exit(f"chunk {first}: {done.stderr.decode(errors='replace')[-2000:]}")
        chunk = {
            "command": "kvlift " + " ".join(command),
            "core": core,
            "seconds": round(time.time() - began_s),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "found": json.loads(done.stdout),
        }
        path.write_text(json.dumps(chunk) + "\n")
        n_violations = len(chunk["found"]["violations"])
        print(f"chunk {first}: {chunk['seconds']} s, {n_violations} violations", flush=True)


def merged(chunks: Sequence[Mapping[str, Any]], commit: str) -> dict[str, object]:
    """One result. Exits where the chunks are not of one core."""
    cores = {chunk["core"] for chunk in chunks}
    if len(cores) != 1:
        sys.exit(f"these chunks are of {len(cores)} cores, {sorted(cores)}: play them anew")
    found = [chunk["found"] for chunk in chunks]
    result: dict[str, object] = {"seed": min(one["seed"] for one in found)}
    result |= {name: round(sum(one[name] for one in found), 3) for name in SUMS}
    for name in COUNTS:
        total: Counter[str] = Counter()
        for one in found:
            total.update(one[name])
        result[name] = dict(sorted(total.items()))
    result["violations"] = [violation for one in found for violation in one["violations"]]
    return {
        "bench": "simulate-deep",
        "machine": machine(),
        "commands": [chunk["command"] for chunk in chunks],
        "note": f"run in chunks, one process each, and added up here; chunks: {len(chunks)}",
        "commit": commit,
        "core": cores.pop(),
        "date": max(chunk["date"] for chunk in chunks),
        "seconds_of_chunks": [chunk["seconds"] for chunk in chunks],
        "result": result,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--chunk", type=int, default=100)
    parser.add_argument("--ticks", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--keep", type=Path, help="merge what is there into this file")
    parser.add_argument("--commit", default="", help="the commit that the chunks are of")
    options = parser.parse_args()
    if options.keep is None:
        play(options)
        return
    paths = sorted(options.out.glob("chunk-*.json"), key=lambda path: int(path.stem[6:]))
    if not paths:
        sys.exit(f"there is no chunk in {options.out}: run without --keep first")
    chunks = [json.loads(path.read_text()) for path in paths]
    options.keep.write_text(json.dumps(merged(chunks, options.commit), indent=1) + "\n")


if __name__ == "__main__":
    main()
