"""A process that plays seeds: `python -m kvlift.testing.sim.worker JOB`, a result a line."""

import sys
from collections.abc import Iterator

import msgspec
from attrs import evolve, frozen

from kvlift.testing.sim.plan import Options
from kvlift.testing.sim.run import Result, Violation, play


@frozen(kw_only=True)
class SimJob:
    """`repeat_every`: each n-th seed is played twice, and must decide the same; 0: none."""

    seeds: tuple[int, ...]
    options: Options
    repeat_every: int = 0


def results(job: SimJob) -> Iterator[Result]:
    """One result a seed, in order. Raises `TraceError` where the trace can't be read."""
    for seed in job.seeds:
        result = play(seed, job.options)
        if job.repeat_every and seed % job.repeat_every == 0:
            result = _compared(result, play(seed, job.options))
        yield result


def _compared(first: Result, second: Result) -> Result:
    if first.digest == second.digest:
        return evolve(first, is_repeated=True)
    said = f"determinism: two runs have the digests {first.digest} and {second.digest}"
    violation = Violation(seed=first.seed, tick=first.n_ticks, claim=said)
    return evolve(first, is_repeated=True, violations=(*first.violations, violation))


def main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=SimJob)
    for result in results(job):
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
