"""What travels between the scheduler's side and the workers with vLLM's own step."""

from attrs import field, frozen

from kvlift.runtime.hosted import Orders


@frozen
class Keep:
    """A finished prompt that a prefill instance keeps for a decode instance.

    `tokens`: those whose KV lies in `blocks`, little-endian int32; `namespace`: what else decided
    it, and who may see it."""

    rid: str
    namespace: bytes
    tokens: bytes = field(repr=False)
    blocks: tuple[int, ...]


@frozen(kw_only=True)
class StepOrders:
    """From the scheduler's side to every worker, with one step.

    `wants_ballot`: `orders`, of this step, are to be answered. `loaded`: requests whose load has
    ended on all workers; `failed_blocks`: blocks of theirs that did not come."""

    orders: Orders | None = None
    wants_ballot: bool = False
    loaded: tuple[str, ...] = ()
    failed_blocks: tuple[int, ...] = ()
    keeps: tuple[Keep, ...] = ()


@frozen
class StepReport:
    """From the workers back: their ballots, in any order."""

    ballots: tuple[tuple[int, ...], ...]

    def with_other(self, other: "StepReport") -> "StepReport":
        return StepReport(self.ballots + other.ballots)
