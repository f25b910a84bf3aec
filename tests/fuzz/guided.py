"""atheris in front of a surface: bytes changed by what new branches they reach.

    python -m tests.fuzz.guided SURFACE INPUTS SEED REPORT

libFuzzer ends the process itself, so this is one of its own and leaves its report in a file.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

ROOT: Final = Path(__file__).resolve().parents[2]
N_SEEDS: Final = 300
INPUT_BYTES_MAX: Final = 8192
INSTRUMENTED: Final = ("kvlift.effects", "kvlift.runtime", "kvlift.testing")
NEEDED: Final = "atheris is missing: pip install -e '.[fuzz]' brings it"


def is_there() -> bool:
    return importlib.util.find_spec("atheris") is not None


def by_coverage(surface: str, n_inputs: int, seed: int) -> dict[str, Any]:
    """Run it in a process of its own; the report of its meter."""
    with tempfile.TemporaryDirectory(prefix="kvlift-fuzz-") as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "tests.fuzz.guided", surface, str(n_inputs), str(seed)]
        ended = subprocess.run(
            [*command, str(report)], cwd=ROOT, capture_output=True, check=False, text=True
        )
        if not report.exists():
            raise RuntimeError(f"atheris ended with {ended.returncode}: {ended.stderr[-2000:]}")
        found: dict[str, Any] = msgspec.json.decode(report.read_bytes())
        return found


def main(name: str, n_inputs: int, seed: int, report: Path) -> None:
    import atheris

    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        from tests.fuzz.harness import Meter, bound_memory
        from tests.fuzz.surfaces import surface_of

        surface = surface_of(name)
    meter = Meter(surface)
    draw = Random(f"{name}/guided/{seed}")
    bound_memory()

    def feed(data: bytes) -> None:
        meter.feed(data)
        if meter.n_inputs == n_inputs:
            surface.close()
            report.write_bytes(msgspec.json.encode(meter.report()))
            os._exit(0)

    # Beside the report, whose folder the parent removes: this process ends without a clean-up.
    corpus = report.with_name("corpus")
    corpus.mkdir()
    for number in range(N_SEEDS):
        (corpus / str(number)).write_bytes(surface.made(draw)[:INPUT_BYTES_MAX])
    options = [
        *(f"-seed={seed % (1 << 31) or 1}", f"-max_len={INPUT_BYTES_MAX}", "-verbosity=0"),
        # Time and memory are watched by the meter, which names the input.
        *("-timeout=0", "-rss_limit_mb=0", "-len_control=0"),
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], feed)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
