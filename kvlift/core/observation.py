"""What one rank says of one open ticket, in three integers that MIN reduces.

`progress`: pages that are good so far, in order. `ended`: 1 when nothing moves under this ticket
any more. `ceiling`: the most that will ever be good, so that bad news of one rank travels at once;
for a peer's conversation 0, or the (negative) cause of its failure; `OVERDUE` for a read that is
given up. A first token t is `progress = t + 1`, `ceiling = -(t + 1)`: under MIN they differ if any
two ranks do.
"""

from typing import Final

from attrs import frozen

OVERDUE: Final = -1
N_INTS: Final = 3


@frozen
class Observation:
    progress: int
    ended: int
    ceiling: int


def of_token(token: int) -> Observation:
    return Observation(progress=token + 1, ended=1, ceiling=-(token + 1))


def is_one_token(agreed: Observation) -> bool:
    """Whether all ranks that have a first token have the same one."""
    return agreed.progress == -agreed.ceiling


def both(one: Observation, other: Observation) -> Observation:
    """MIN of two ranks; associative, commutative, idempotent."""
    return Observation(
        min(one.progress, other.progress),
        min(one.ended, other.ended),
        min(one.ceiling, other.ceiling),
    )
