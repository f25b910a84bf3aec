"""The ranks port for a group of one, and the checks that every ranks port shares."""

from collections.abc import Sequence

from attrs import define, field

REPORT_BYTES_MAX: int = 1 << 20
"""The longest report that `exchange` carries."""

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1


def checked_ballot(ballot: Sequence[int], ballot_length: int) -> tuple[int, ...]:
    """The ballot as a tuple. Refuses here what would end a process inside gloo.

    Raises ValueError for another length or for a number beyond 64 bits.
    """
    if len(ballot) != ballot_length:
        raise ValueError(
            f"a ballot of this group has {ballot_length} numbers, not {len(ballot)}:"
            " build it with the same config on every rank"
        )
    if ballot and not (min(ballot) >= INT64_MIN and max(ballot) <= INT64_MAX):
        raise ValueError("a ballot carries signed 64-bit numbers: clip counts before they go in")
    return tuple(ballot)


def checked_report(report: bytes) -> bytes:
    """Raises ValueError for a report longer than REPORT_BYTES_MAX."""
    if len(report) > REPORT_BYTES_MAX:
        raise ValueError(
            f"a report has at most {REPORT_BYTES_MAX} bytes, not {len(report)}: shorten it"
        )
    return bytes(report)


@define
class LoneRank:
    """Implements `ports.Ranks` for one rank: its ballot is the verdict."""

    ballot_length: int
    _sent: tuple[int, ...] | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    @property
    def rank(self) -> int:
        return 0

    @property
    def n_ranks(self) -> int:
        return 1

    def send(self, ballot: Sequence[int]) -> None:
        self._refuse_closed()
        if self._sent is not None:
            raise RuntimeError("send() before the verdict of the last ballot was taken")
        self._sent = checked_ballot(ballot, self.ballot_length)

    def verdict(self) -> tuple[int, ...]:
        self._refuse_closed()
        if self._sent is None:
            raise RuntimeError("verdict() without a ballot: call send() first")
        verdict, self._sent = self._sent, None
        return verdict

    def exchange(self, report: bytes) -> list[bytes]:
        self._refuse_closed()
        return [checked_report(report)]

    def close(self) -> None:
        self._closed = True

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this group is closed: make a new one")
