"""One MIN reduction of 64-bit integers: what a rank proposes, and what all ranks have agreed.

    header   tick, schema, requests, state     each as [h, -h]: equal on all ranks or it shows
             room on the device, on the host   the poorest rank decides
             read cost (negated: the slowest), transfer cost (the fastest), health, submissions
    slots    three integers an open ticket     see `observation`; N slots, the rest wait their turn

The length is fixed by the policy, since gloo ends the process on a wrong shape.
"""

from hashlib import blake2b
from typing import Final, TypeAlias

from attrs import frozen

from kvlift.core.agreed import Agreed, Rates
from kvlift.core.ids import Ticket
from kvlift.core.observation import N_INTS, Observation
from kvlift.core.policy import Policy

SCHEMA: Final = 1
PAIRS: Final = ("tick", "schema", "requests", "state")
N_HEADER: Final = 2 * len(PAIRS) + 6
BIG: Final = 2**62


class RanksDiverged(RuntimeError):
    """The ranks do not mean the same thing. The host must end the group."""

    def __init__(self, field: str, tick: int, detail: str = "") -> None:
        super().__init__(
            f"ranks differ in '{field}' at tick {tick}{': ' + detail if detail else ''}"
        )
        self.field = field
        self.tick = tick


class RankFailed(RuntimeError):
    """A rank has reported an error of its own; the group can't go on."""

    def __init__(self, tick: int) -> None:
        super().__init__(f"a rank reported a failure of its own at tick {tick}")
        self.tick = tick


@frozen(kw_only=True)
class Room:
    """Pages that this rank can give to the device and host tiers, used ones included."""

    device: int
    host: int


@frozen(kw_only=True)
class Verdict:
    """What all ranks have agreed for one tick; `observations` are those that are new."""

    device_room: int
    host_room: int
    rates: Rates
    n_submissions: int
    observations: tuple[tuple[Ticket, Observation], ...]


def ballot_length(policy: Policy) -> int:
    return N_HEADER + N_INTS * policy.ballot_slots


def slots(agreed: Agreed, policy: Policy) -> tuple[Ticket, ...]:
    """The tickets that this tick's ballot speaks of: all, or the next N in agreed order."""
    tickets = tuple(agreed.tickets)
    n_slots = policy.ballot_slots
    if len(tickets) <= n_slots:
        return tickets
    first = agreed.tick * n_slots % len(tickets)
    return (tickets + tickets)[first : first + n_slots]


def digest_of_requests(agreed: Agreed) -> int:
    """62 bits over the ordered list of (request, attempt)."""
    listed = "\0".join(f"{r.attempt}:{r.rid}" for r in agreed.requests.values())
    return int.from_bytes(blake2b(listed.encode(), digest_size=8).digest(), "little") % BIG


Proofs: TypeAlias = tuple[int, ...]


def proofs(agreed: Agreed) -> Proofs:
    """The header's values that must be equal on all ranks, in the order of `PAIRS`."""
    state = int.from_bytes(agreed.digest[:8], "little") % BIG
    return (agreed.tick, SCHEMA, digest_of_requests(agreed), state)


def to_wire(
    proven: Proofs,
    policy: Policy,
    *,
    room: Room,
    rates: Rates,
    is_healthy: bool,
    n_submissions: int,
    seen: tuple[Observation, ...],
) -> tuple[int, ...]:
    """This rank's ballot; `seen` are its observations of the `slots`, in that order."""
    header = header_of(
        proven, room=room, rates=rates, is_healthy=is_healthy, n_submissions=n_submissions
    )
    return header + body_of(seen, policy)


def header_of(
    proven: Proofs, *, room: Room, rates: Rates, is_healthy: bool, n_submissions: int
) -> tuple[int, ...]:
    return (
        *(signed for proof in proven for signed in (proof, -proof)),
        room.device,
        room.host,
        -rates.prefetch_us,
        rates.transfer_us if rates.transfer_us else BIG,
        int(is_healthy),
        n_submissions,
    )


def body_of(seen: tuple[Observation, ...], policy: Policy) -> tuple[int, ...]:
    """Three integers a slot, zeros in those that are not in use."""
    body = [value for o in seen for value in (o.progress, o.ended, o.ceiling)]
    return (*body, *[0] * (N_INTS * (policy.ballot_slots - len(seen))))


def first_difference(least: tuple[int, ...]) -> str | None:
    """The first proof of the reduced header in which ranks differ."""
    for at, name in enumerate(PAIRS):
        if least[2 * at] != -least[2 * at + 1]:
            return name
    return None


def from_wire(least: tuple[int, ...], agreed: Agreed, policy: Policy) -> Verdict:
    """The verdict of a reduced ballot; `agreed` is the state that was voted on (a growth since then
    may have opened tickets). Raises `RanksDiverged`, or `RankFailed`."""
    if len(least) != ballot_length(policy):
        raise RanksDiverged("length", agreed.tick, f"{len(least)} integers came back")
    field = first_difference(least)
    if field is not None:
        raise RanksDiverged(field, agreed.tick)
    if least[0] != agreed.tick:
        detail = f"the ballots speak of tick {least[0]}: carry the answers to the last orders"
        raise RanksDiverged("tick", agreed.tick, detail)
    device, host, prefetch, transfer, healthy, n_submissions = least[2 * len(PAIRS) : N_HEADER]
    if not healthy:
        raise RankFailed(agreed.tick)
    observations = []
    body = iter(least[N_HEADER:])
    for ticket, progress, ended, ceiling in zip(
        slots(agreed, policy), body, body, body, strict=False
    ):
        known = agreed.tickets[ticket]
        if ended or progress != known.progress or ceiling != known.ceiling:
            observations.append((ticket, Observation(progress, ended, ceiling)))
    return Verdict(
        device_room=device,
        host_room=host,
        rates=Rates(prefetch_us=-prefetch, transfer_us=0 if transfer == BIG else transfer),
        n_submissions=n_submissions,
        observations=tuple(observations),
    )
