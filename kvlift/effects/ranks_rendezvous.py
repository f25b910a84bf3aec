"""How ranks find each other in the launcher's store, and the rare exchange of reports there."""

import base64
import threading
import time
from contextlib import suppress

import torch.distributed as dist
from attrs import define, field, frozen

from kvlift.effects.lone_rank import REPORT_BYTES_MAX, checked_report
from kvlift.effects.patience import Patience
from kvlift.effects.ports import RankLate, RankLost

LOOK_S = 0.005
PROTOCOL = "kvlift-ranks-1"
NO_STORE = "the launcher's store does not answer"


@frozen
class GroupShape:
    """What must be equal on all ranks before gloo may see a vector."""

    n_ranks: int
    ballot_length: int

    def to_bytes(self) -> bytes:
        return f"{PROTOCOL} n_ranks={self.n_ranks} ballot_length={self.ballot_length}".encode()


@define(eq=False)
class Rendezvous:
    """This rank's keys in the group's part of the store."""

    rank: int
    n_ranks: int
    store: dist.Store
    _n_exchanges: int = field(default=0, init=False)

    def claim(self, group: str) -> None:
        """Raises ValueError if this rank of this group has joined before."""
        if self.store.add(f"claim/{self.rank}", 1) != 1:
            raise ValueError(
                f"rank {self.rank} has joined the group {group!r} before: give each rank its own"
                " number, and a restarted group a new name"
            )

    def meet(self, shape: GroupShape, timeout_s: float) -> None:
        """Wait for all ranks and compare shapes.

        Raises RankLate for ranks that do not come, RankLost for those that have not waited so
        long for this one or if the store is gone, ValueError for one that was configured
        differently.
        """
        try:
            shapes = self._gathered("shape", shape.to_bytes(), timeout_s)
            gone = tuple(r for r in range(self.n_ranks) if self.store.check([f"gone/{r}"]))
        except RankLate:
            with suppress(RuntimeError):
                self.store.set(f"gone/{self.rank}", "it did not wait any longer")
            raise
        except RankLost:
            raise
        except RuntimeError as error:
            raise RankLost((), f"{NO_STORE}: {str(error)[:200]}") from error
        if gone:
            raise RankLost(gone, "it has not waited for all ranks to join: start them all again")
        for rank, other in enumerate(shapes):
            if other != shape.to_bytes():
                raise ValueError(
                    f"rank {rank} has joined with {other[:200].decode(errors='replace')!r}, this"
                    f" rank {self.rank} with {shape.to_bytes().decode()!r}: start all ranks with"
                    " one config"
                )

    def exchange(self, report: bytes, deadline_s: float) -> list[bytes]:
        """Every rank's report, by rank. Ranks must call it equally often.

        The store is asked from a thread, since a frozen launcher would hold the call for ever.
        Raises RankLate naming the ranks whose report is missing, RankLost if the store is gone.
        """
        own = checked_report(report)
        self._n_exchanges += 1
        topic = f"exchange-{self._n_exchanges}"
        reports: list[list[bytes]] = []
        failures: list[RankLate | RankLost] = []

        def gather() -> None:
            try:
                reports.append(self._gathered(topic, own, deadline_s))
                self._forget(self._n_exchanges - 2)
            except (RankLate, RankLost) as error:
                failures.append(error)
            except RuntimeError as error:
                failures.append(RankLost((), f"{NO_STORE}: {str(error)[:200]}"))

        thread = threading.Thread(target=gather, name="kvlift-exchange", daemon=True)
        thread.start()
        patience = Patience(deadline_s + 0.5)
        while thread.is_alive() and patience.left_s():
            with patience.turn() as turn_s:
                thread.join(turn_s)
        if reports:
            return reports[0]
        raise failures[0] if failures else RankLost((), NO_STORE)

    def _gathered(self, topic: str, own: bytes, timeout_s: float) -> list[bytes]:
        self.store.set(f"{topic}/{self.rank}", base64.b64encode(own).decode())
        keys = [f"{topic}/{rank}" for rank in range(self.n_ranks)]
        patience = Patience(timeout_s)
        while not self.store.check(keys):
            if not patience.left_s():
                missing = tuple(r for r, key in enumerate(keys) if not self.store.check([key]))
                if not missing:
                    break
                raise RankLate(missing, timeout_s)
            with patience.turn(LOOK_S) as turn_s:
                time.sleep(turn_s)
        reports = []
        for rank, key in enumerate(keys):
            text = self.store.get(key)
            if len(text) > 2 * REPORT_BYTES_MAX:
                raise RankLost((rank,), f"its report in {topic} is longer than any rank sends")
            try:
                reports.append(base64.b64decode(text, validate=True))
            except ValueError:
                raise RankLost((rank,), f"its report in {topic} is damaged") from None
        return reports

    def _forget(self, exchange: int) -> None:
        """Own key of the exchange before the last: who entered the last one has read it."""
        if exchange > 0:
            self.store.delete_key(f"exchange-{exchange}/{self.rank}")


def without_address(gloo_keys: dist.Store, own_rank: int, n_ranks: int) -> tuple[int, ...]:
    """The ranks that have not told gloo where to reach them. Nobody, if this one has not either: it
    has failed by itself, or torch keeps such things under other names now."""
    try:
        absent = tuple(r for r in range(n_ranks) if not gloo_keys.check([f"0/{r}"]))
    except RuntimeError:
        return ()
    return () if own_rank in absent else absent
