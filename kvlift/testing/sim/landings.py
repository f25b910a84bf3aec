"""Storage and copies in virtual time: what was started ends later, well or not."""

from collections.abc import Iterable
from random import Random

from attrs import define, field

from kvlift.testing.sim.agenda import Agenda, some_of
from kvlift.testing.sim.faults import Faults
from kvlift.testing.sim.plan import NS_PER_MS, Plan
from kvlift.testing.sim_operation import Kind, Operation
from kvlift.testing.sim_rank import SimRank


def newer(log: Iterable[Operation], last: Operation | None) -> list[Operation]:
    """The operations of a log, newest first, that came after `last`; oldest first."""
    found = []
    for operation in log:
        if operation is last:
            break
        found.append(operation)
    return found[::-1]


@define(eq=False)
class Landings:
    """One rank's reads, writes and copies. A silent store keeps what is due until it speaks."""

    plan: Plan
    faults: Faults
    agenda: Agenda
    rank: SimRank
    draw: Random
    is_silent: bool = False
    _kept: list[Operation] = field(factory=list)
    _last_stored: Operation | None = None
    _last_copied: Operation | None = None

    def look(self) -> None:
        """Put down the ends of what was started since the last look."""
        for operation in newer(reversed(self.rank.store.log), self._last_stored):
            self._last_stored = operation
            self._schedule_store(operation)
        for operation in newer(reversed(self.rank.copies.log), self._last_copied):
            self._last_copied = operation
            self._schedule_copy(operation)

    def speak(self) -> None:
        """The store answers again, what is due first."""
        self.is_silent = False
        kept, self._kept = self._kept, []
        for operation in kept:
            self._end_store_after(some_of(self.draw, self.plan.delays.lookup_ns), operation)

    def _schedule_store(self, operation: Operation) -> None:
        delays, config, faults = self.plan.delays, self.plan.config, self.faults
        if operation.kind is Kind.PERSIST:
            delay_ns = some_of(self.draw, delays.persist_ns)
        elif operation.kind is Kind.READ:
            delay_ns = some_of(self.draw, delays.read_ns)
        else:
            delay_ns = some_of(self.draw, delays.lookup_ns)
        if faults.strikes("store_slow"):
            delay_ns *= faults.stream("store_slow").randint(5, 30)
        if operation.kind is not Kind.PERSIST and faults.strikes("store_late"):
            is_lookup = operation.kind is Kind.LOOKUP
            deadline_ms = config.prefetch_deadline_ms
            if not is_lookup:
                deadline_ms = config.limits().read_deadline_ms()
            late = faults.stream("store_late").uniform(1.05, 3)
            delay_ns = int(deadline_ms * NS_PER_MS * late)
        if operation.kind is Kind.READ and len(operation.values) > 1:
            self.agenda.after(delay_ns // 2, lambda: self._progress(operation))
        self._end_store_after(delay_ns, operation)

    def _end_store_after(self, delay_ns: int, operation: Operation) -> None:
        self.agenda.after(delay_ns, lambda: self._end_store(operation))

    def _progress(self, operation: Operation) -> None:
        """The first pages of a read are there already, and verified."""
        store = self.rank.store
        if self.is_silent or not operation.is_outstanding or self.draw.random() < 0.5:
            return
        store.progress(operation, len(operation.values) // 2)

    def _end_store(self, operation: Operation) -> None:
        if self.is_silent:
            self._kept.append(operation)
            return
        store, faults = self.rank.store, self.faults
        match operation.kind:
            case Kind.PERSIST if not operation.is_outstanding:
                return  # called back meanwhile
            case Kind.PERSIST:
                fails = faults.strikes("persist_fail")
                store.fail(operation) if fails else store.land(operation)
            case Kind.READ:
                self._end_read(operation)
            case _:
                fails = faults.strikes("store_fail")
                store.fail(operation) if fails else store.land(operation)
        self._perhaps_twice(operation)

    def _end_read(self, operation: Operation) -> None:
        store, faults = self.rank.store, self.faults
        if faults.strikes("store_fail"):
            store.fail(operation)
        elif faults.strikes("store_short"):
            n_pages = faults.stream("store_short").randrange(len(operation.values))
            store.land(operation, n_pages)
        else:
            store.land(operation)

    def _schedule_copy(self, operation: Operation) -> None:
        delay_ns = some_of(self.draw, self.plan.delays.copy_ns)
        if self.faults.strikes("copy_slow"):
            delay_ns *= self.faults.stream("copy_slow").randint(10, 100)
        self.agenda.after(delay_ns, lambda: self._end_copy(operation))

    def _end_copy(self, operation: Operation) -> None:
        kind = "restore_fail" if operation.kind is Kind.RESTORE else "mirror_fail"
        copies = self.rank.copies
        copies.fail(operation) if self.faults.strikes(kind) else copies.land(operation)
        self._perhaps_twice(operation)

    def _perhaps_twice(self, operation: Operation) -> None:
        if self.faults.strikes("duplicate"):
            self.repeat(operation)

    def repeat(self, operation: Operation) -> None:
        """Deliver the report of an ended operation once more."""
        assert operation.report is not None
        is_copy = operation.kind in (Kind.RESTORE, Kind.MIRROR)
        box = self.rank.copies.outbox if is_copy else self.rank.store.outbox
        box.put(operation.report)

    def ended(self) -> list[Operation]:
        """Operations that are over and still remembered."""
        logs = (*self.rank.store.log, *self.rank.copies.log)
        return [one for one in logs if one.report is not None]
