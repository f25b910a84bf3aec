"""Many results as one: the counts that `kvlift simulate` prints."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from attrs import define, field

from kvlift.testing.sim.run import Result, Violation

ENDS: Final = ("done", "aborted", "failed", "retryable")
TIERS: Final = ("device", "host", "storage")


@define(eq=False)
class Report:
    """`ended` counts submissions: a request that is sent to another prefill node is one more.

    `hit`: pages that requests found in each tier when they became ready for the first time.
    """

    first_seed: int
    n_seeds: int = 0
    n_ticks: int = 0
    n_requests: int = 0
    n_repeated: int = 0
    virtual_s: float = 0.0
    ended: "Counter[str]" = field(factory=Counter)
    hit: "Counter[str]" = field(factory=Counter)
    faults: "Counter[str]" = field(factory=Counter)
    n_widened: int = 0
    n_retracted: int = 0
    n_failed_by_cache: int = 0
    n_leaks: int = 0
    n_divergences: int = 0
    violations: list[Violation] = field(factory=list)

    @classmethod
    def of(cls, first_seed: int, results: Iterable[Result]) -> "Report":
        made = cls(first_seed)
        for result in results:
            made.add(result)
        return made

    def add(self, result: Result) -> None:
        self.n_seeds += 1
        self.n_ticks += result.n_ticks
        self.n_requests += result.n_requests
        self.n_repeated += result.is_repeated
        self.virtual_s += result.virtual_s
        self.ended.update(result.ended)
        self.hit.update(result.hit)
        self.faults.update(result.faults)
        self.n_widened += result.n_widened
        self.n_retracted += result.n_retracted
        self.n_failed_by_cache += result.n_failed_by_cache
        self.n_leaks += result.n_leaks
        self.n_divergences += result.n_divergences
        self.violations.extend(result.violations)

    def as_json(self) -> dict[str, object]:
        """The fields that scripts rely on, and a few more; violations in the order of seeds."""
        return {
            "seed": self.first_seed,
            "seeds": self.n_seeds,
            "ticks": self.n_ticks,
            "requests": self.n_requests,
            "ended": {end: self.ended[end] for end in ENDS},
            "hit": {tier: self.hit[tier] for tier in TIERS},
            "widened": self.n_widened,
            "retracted": self.n_retracted,
            "faults": dict(sorted(self.faults.items())),
            "failed_by_cache": self.n_failed_by_cache,
            "leaks": self.n_leaks,
            "divergences": self.n_divergences,
            "repeated": self.n_repeated,
            "virtual_seconds": round(self.virtual_s, 3),
        }
