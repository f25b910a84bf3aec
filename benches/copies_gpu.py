"""Copies on one GPU, every variant: rates against one contiguous pinned copy, submission cost,
decode beside it, storage to device.

    python benches/copies_gpu.py --out FILE [--rounds N] [--parts storage,rates] [--commit HASH]

`kvlift bench copies` measures the default alone. Every case checks its bytes on fresh random data,
is timed in rounds that alternate with the ceiling, and stands alone: one that fails is a row with
`error`, and the script goes on.
"""

import argparse
import ctypes
import datetime as dt
import importlib
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from kvlift.cli.benches.copies.decode import BESIDE, MAIN, WITH_INPUT, decode_beside
from kvlift.cli.benches.copies.rates import VARIANTS, other_rates, variant_rates
from kvlift.cli.benches.copies.recorder import Recorder
from kvlift.cli.benches.copies.setup import PAGE_8MIB
from kvlift.cli.benches.copies.storage import storage_to_device
from kvlift.cli.benches.copies.together import duplex, together
from kvlift.cli.benches.row import Row
from kvlift.effects.copies_scatter import HAS_TRITON


def machine() -> dict[str, object]:
    try:
        triton = importlib.import_module("triton").__version__ if HAS_TRITON else None
    except ImportError:
        triton = None
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton,
        "python": platform.python_version(),
        "driver": _driver_version(),
        "n_cpus": os.cpu_count(),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    }


def _driver_version() -> int:
    """What the CUDA driver supports, 13000 for 13.0."""
    version = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def no_part(_bench: Recorder) -> None:
    """`rates` takes the variants as well."""


PARTS: dict[str, Callable[[Recorder], None]] = {
    "storage": lambda bench: storage_to_device(bench, PAGE_8MIB, 128),
    "decode-main": lambda bench: decode_beside(bench, MAIN),
    "input": lambda bench: decode_beside(bench, WITH_INPUT, has_input=True),
    "rates": no_part,
    "others": other_rates,
    "together": together,
    "duplex": duplex,
    "decode": lambda bench: decode_beside(bench, BESIDE),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds of each case")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--variants", default=",".join(VARIANTS), help="of the part rates")
    parser.add_argument("--commit", default=None, help="written into the result")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this bench needs a CUDA device", file=sys.stderr)
        return 2
    report = {
        "bench": "copies",
        "machine": machine(),
        "command": " ".join(["python", *sys.argv]),
        "commit": arguments.commit,
    }

    def told(row: Row) -> None:
        # After each row, so that a run cut short has what it measured.
        rows = [each.as_json() for each in bench.rows]
        arguments.out.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")
        print(json.dumps(row.as_json()), flush=True)

    bench = Recorder(n_rounds=max(3, arguments.rounds), on_row=told)
    for name in arguments.parts.split(","):
        with bench.case(name):
            if name == "rates":
                variant_rates(bench, arguments.variants.split(","))
            else:
                PARTS[name](bench)
    print(f"{len(bench.rows)} rows, {bench.n_errors} errors: {arguments.out}")
    return 1 if bench.n_errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
