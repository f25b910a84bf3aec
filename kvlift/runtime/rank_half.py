"""One rank's half of a tick: its ports, its physical pages, what it sees of the open tickets.

A lock-step `Driver` has one beside its agreed half; with one scheduler and many workers each worker
has one, and the scheduler has the agreed half (`hosted`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from kvlift.core.ballot import Proofs, Room, body_of, header_of
from kvlift.core.effect import Effect
from kvlift.core.hear import hear, order
from kvlift.core.ids import Ticket
from kvlift.core.landed import Landed
from kvlift.core.local import Local, next_deadline_ns, seen
from kvlift.core.tier import Tier
from kvlift.effects.pages import PageTable
from kvlift.runtime.config import Config
from kvlift.runtime.interpret import Ports, run_effect
from kvlift.runtime.observer import Observer
from kvlift.runtime.places import device_table


class RankHalf:
    """`n_started` counts the effects that were started since `begin_tick`, by class name. `fault`
    is the first error of this rank's own."""

    def __init__(self, config: Config, ports: Ports, observer: Observer) -> None:
        self.ports = ports
        self.local = Local()
        self.device = device_table(config)
        self.host = PageTable(config.host_pages)
        self.aside = {Tier.DEVICE: 0, Tier.HOST: 0}
        self.n_started: Counter[str] = Counter()
        self._observer = observer
        self.fault: Exception | None = None
        # The body of the last ballot, for as long as nothing has been seen or asked anew.
        self._said_of: object = None
        self._said_tickets: Sequence[Ticket] = ()
        self._said: tuple[int, ...] = ()
        self.reconfigure(config)

    def reconfigure(self, config: Config) -> None:
        self._policy = config.policy()
        self._limits = config.limits()

    @property
    def is_healthy(self) -> bool:
        return self.fault is None

    def begin_tick(self) -> None:
        self.n_started = Counter()

    def hear(self, now_ns: int) -> list[Landed]:
        """Collect what landed here; deadlines become observations; what follows may start."""
        ports = self.ports
        reports = [*ports.copies.landed(), *ports.peers.landed()]
        if ports.store is not None:
            reports += ports.store.landed()
        self.local, starts = hear(self.local, self._limits, reports, now_ns)
        self._run(starts)
        return reports

    def order(self, effects: Iterable[Effect], closed: Iterable[Ticket], now_ns: int) -> None:
        """Start what a decision asks for, as far as it may start here now."""
        self.local, starts = order(self.local, self._limits, effects, closed, now_ns)
        self._run(starts)

    def run_ordered(self, local: Local, starts: Sequence[Effect]) -> None:
        """The same where `advance` has ordered already."""
        self.local = local
        self._run(starts)

    def _run(self, starts: Sequence[Effect]) -> None:
        """A failure of our own becomes a bit in the next ballot, never a skipped one."""
        for effect in starts:
            self.n_started[type(effect).__name__] += 1
            try:
                run_effect(effect, self.ports, self.device, self.host)
            except Exception as error:  # noqa: BLE001 - a bug of a port, told to all ranks
                self.fault = self.fault or error
                self._observer.failed(effect, error)

    def ballot(
        self, proofs: Proofs, tickets: Sequence[Ticket], n_submissions: int
    ) -> tuple[int, ...]:
        """What this rank has to say of these tickets, and what room it has."""
        if self._said_of is not self.local.watches or self._said_tickets != tickets:
            self._said_of, self._said_tickets = self.local.watches, tickets
            self._said = body_of(seen(self.local, tickets), self._policy)
        header = header_of(
            proofs,
            room=self._room(),
            rates=self.local.rates,
            is_healthy=self.is_healthy,
            n_submissions=n_submissions,
        )
        return header + self._said

    def _room(self) -> Room:
        return Room(
            device=self.device.n_pages - self.aside[Tier.DEVICE],
            host=self.host.n_pages - self.aside[Tier.HOST],
        )

    def set_aside(self, tier: Tier, n_pages: int) -> None:
        n_pages_max = self.device.n_pages if tier is Tier.DEVICE else self.host.n_pages
        self.aside[tier] = max(0, min(n_pages, n_pages_max))

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something lands, or until the next deadline of this rank."""
        deadline_ns = next_deadline_ns(self.local)
        if deadline_ns is not None:
            left_s = (deadline_ns - self.ports.clock.now_ns()) / 1e9
            timeout_s = max(0.0, min(timeout_s, left_s))
        return self.ports.wakeup.wait(timeout_s)

    def close(self, deadline_s: float) -> bool:
        """Wait for what runs; False when something still does, and then its memory stays mapped."""
        ports = self.ports
        is_quiet = ports.peers.close(deadline_s)
        if ports.store is not None:
            is_quiet = ports.store.close(deadline_s) and is_quiet
        is_quiet = ports.copies.close(deadline_s) and is_quiet
        ports.ranks.close()
        return is_quiet
