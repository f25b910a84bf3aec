"""Copies between host and device beside one contiguous copy of the same bytes, in turns.

On a GPU the figures of the targets; without one the CPU's engine, whose copies are plain memory
copies by a thread. `benches/copies_gpu.py` measures every variant as well.
"""

from collections.abc import Callable

import torch

from kvlift.cli.benches.copies.decode import MAIN, decode_beside
from kvlift.cli.benches.copies.rates import main_rates
from kvlift.cli.benches.copies.recorder import Recorder
from kvlift.cli.benches.copies.setup import LAYOUTS, PAGE_8MIB
from kvlift.cli.benches.copies.storage import storage_to_device
from kvlift.cli.benches.row import Row

N_ROUNDS = 9
N_ROUNDS_CPU = 3
N_PAGES_CPU = {"8MiB": 16, "1MiB": 64}
N_PAGES_TINY = {"8MiB": 2, "1MiB": 4}


def measure(progress: Callable[[str], None], *, is_tiny: bool = False) -> list[Row]:
    is_gpu = torch.cuda.is_available()
    full = {size: n_pages for size, (_, n_pages) in LAYOUTS.items()} if is_gpu else N_PAGES_CPU
    n_pages_by_size = N_PAGES_TINY if is_tiny else full
    bench = Recorder(n_rounds=N_ROUNDS if is_gpu and not is_tiny else N_ROUNDS_CPU)
    progress("rates")
    main_rates(bench, n_pages_by_size)
    progress("from storage to the device")
    storage_to_device(bench, PAGE_8MIB, n_pages_by_size["8MiB"])
    if is_gpu and not is_tiny:
        progress("a decode step beside them")
        decode_beside(bench, MAIN)
    else:
        progress("decode-beside-restore needs a CUDA device, it is left out")
    return bench.rows
