"""The call of `kvlift simulate` that plays a run again."""

import shlex
from collections.abc import Sequence

from kvlift.testing.sim.plan import Options


def faults_word(faults: Sequence[str] | None) -> str:
    """What `--faults` takes for these kinds."""
    if faults is None:
        return "all"
    return ",".join(faults) or "none"


def command_of(seed: int, options: Options) -> str:
    """One line for a shell."""
    words = ["kvlift", "simulate", "--seed", str(seed), "--ticks", str(options.n_ticks)]
    words += ["--faults", faults_word(options.faults)]
    if options.n_ranks is not None:
        words += ["--ranks", str(options.n_ranks)]
    if options.n_requests_max is not None:
        words += ["--requests", str(options.n_requests_max)]
    if options.trace is not None:
        words += ["--trace", options.trace]
    return shlex.join(words)
