"""`kvlift bench ttft` where a run may be cut short: each row is written when it is there.

python benches/ttft_gpu.py --out FILE [--rates 25,100] [--modes none,all] [--conversations N]
"""

import argparse
import json
import logging
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import attrs
import torch

from kvlift.cli.benches.row import Row, machine
from kvlift.cli.benches.ttft import measure
from kvlift.cli.benches.ttft.sizes import FULL, MODES, TINY


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--rates", default=",".join(f"{rate:g}" for rate in FULL.rates_gbps))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--conversations", type=int, default=None)
    parser.add_argument("--load", type=float, default=None)
    parser.add_argument("--commit", default=None, help="written into the result")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    sizes = FULL if torch.cuda.is_available() else TINY
    sizes = attrs.evolve(
        sizes,
        rates_gbps=tuple(float(rate) for rate in arguments.rates.split(",")),
        modes=tuple(arguments.modes.split(",")),
        n_conversations=arguments.conversations or sizes.n_conversations,
        load=arguments.load or sizes.load,
    )
    answer: dict[str, object] = {
        "bench": "ttft",
        "machine": machine(),
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": arguments.commit,
        "sizes": attrs.asdict(sizes),
    }
    rows: list[dict[str, object]] = []
    begin_s = time.perf_counter()

    def told(row: Row) -> None:
        rows.append(row.as_json())
        arguments.out.write_text(json.dumps({**answer, "rows": rows}, indent=1) + "\n")
        print(json.dumps(row.as_json()), flush=True)

    def progress(what: str) -> None:
        print(f"{time.perf_counter() - begin_s:7.1f} s  {what}", file=sys.stderr, flush=True)

    measure(progress, sizes=sizes, on_row=told)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
