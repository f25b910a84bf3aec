"""The same contract for hosts with one scheduler and many workers: a ballot without a collective.

The scheduler has the agreed half and decides; each worker has a rank half and obeys. The host
carries `Orders` to the workers with its own step, and their ballots back with the step's results.
A worker's pages are the same ones on every worker, since all obey the same orders.

    scheduler  tick(ballots of last step) -> Tick, Orders ---------.
    workers    obey(orders) -> ballot  <--- carried by the host ---'

With `device_tier` off the pages of the device are the host's own: see `lending`.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from attrs import frozen

from kvlift.core.advance import Decision, State, advance_agreed, grow_agreed
from kvlift.core.agreed import agreed_at_start, is_under_way
from kvlift.core.ballot import Proofs, from_wire, proofs, slots
from kvlift.core.effect import Effect, FreeDevice, TakeDevice
from kvlift.core.ids import DeviceHandle, Rid, Ticket
from kvlift.core.index import Hit, match
from kvlift.core.local import Local
from kvlift.core.policy import Switch
from kvlift.core.prompt import Prompt
from kvlift.core.submission import Abort, Finish, Flush, Resume, Retract, Run
from kvlift.core.tier import Tier
from kvlift.effects.clock import MonotonicClock
from kvlift.effects.ports import Clock
from kvlift.effects.wakeup import Wakeup
from kvlift.runtime.answers import check_comes_back
from kvlift.runtime.config import Config
from kvlift.runtime.errors import RequestLeaving, UnknownRequest
from kvlift.runtime.inbox import Inbox
from kvlift.runtime.interpret import Ports
from kvlift.runtime.observer import Observer, Round, SilentObserver
from kvlift.runtime.places import LentPages, device_table
from kvlift.runtime.rank_half import RankHalf
from kvlift.runtime.telling import tick_of
from kvlift.runtime.tick import Granted, Growth, NoRoom, Pending, Tick


@frozen(kw_only=True)
class Orders:
    """What a worker has to start, and which tickets its next ballot has to speak of.

    `is_awaited`: the scheduler wants a ballot back before its next tick. `lent`: the host's blocks
    behind device handles, where the host owns the device's pages."""

    effects: tuple[Effect, ...]
    closed: tuple[Ticket, ...]
    proofs: Proofs
    tickets: tuple[Ticket, ...]
    is_awaited: bool
    lent: Mapping[DeviceHandle, int] = MappingProxyType({})


class Worker:
    """One worker's cache: obeys, and says what it sees. `ports.ranks` is not used."""

    def __init__(self, config: Config, ports: Ports, observer: Observer | None = None) -> None:
        self._config = config
        self._half = RankHalf(config, ports, observer or SilentObserver())

    def obey(self, orders: Orders) -> tuple[int, ...]:
        """Start what is ordered; the ballot to carry back to the scheduler. Never blocks."""
        now_ns = self._half.ports.clock.now_ns()
        self._half.begin_tick()
        if isinstance(self._half.device, LentPages):
            self._half.device.lend(orders.lent)
        self._half.hear(now_ns)
        self._half.order(orders.effects, orders.closed, now_ns)
        return self._half.ballot(orders.proofs, orders.tickets, 0)

    def look(self, orders: Orders) -> tuple[int, ...]:
        """A later ballot for the same orders: what has landed since."""
        self._half.hear(self._half.ports.clock.now_ns())
        return self._half.ballot(orders.proofs, orders.tickets, 0)

    def words_of(self, hold: Ticket) -> tuple[int, float] | None:
        """The first token and its log-probability under a peer's conversation, if it came."""
        return self._half.local.tokens.get(hold)

    def set_aside(self, tier: Tier, n_pages: int) -> None:
        self._half.set_aside(tier, n_pages)

    def wait(self, timeout_s: float) -> bool:
        return self._half.wait(timeout_s)

    def close(self) -> bool:
        return self._half.close(self._config.close_deadline_ms / 1000)


class Scheduler:
    """The agreed half, hosted by one scheduler. The calls are those of `Driver`.

    `Ready.token` is None here: workers have it (`Worker.words_of`). `observer`: as a driver's; what
    it is told of ports comes from the workers' ballots alone. Its clock decides nothing."""

    def __init__(
        self,
        config: Config,
        *,
        storage: Switch,
        observer: Observer | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self._observer: Observer = observer or SilentObserver()
        self._clock: Clock = clock or MonotonicClock()
        self._policy = config.policy()
        self._agreed = self._voted = agreed_at_start(self._policy, storage)
        self._inbox = Inbox(config, Wakeup())
        self._device = device_table(config)
        self._late: list[Decision] = []
        self._n_workers = 0

    def submit(
        self,
        rid: str,
        prompt: Prompt,
        *,
        peer: str,
        priority: int = 0,
        n_pages_output: int = 0,
        n_pages_given: int = 0,
    ) -> None:
        """As `Driver.submit`. `n_pages_given`: see `core.submission.Submit`."""
        self._inbox.submit(
            rid,
            prompt,
            peer=peer,
            priority=priority,
            n_pages_output=n_pages_output,
            n_pages_given=n_pages_given,
        )

    def abort(self, rid: str) -> None:
        self._inbox.call(rid, "abort", Abort(Rid(rid)))

    def run(self, rid: str) -> None:
        self._inbox.call(rid, "run", Run(Rid(rid)))

    def finish(self, rid: str, output: bytes) -> None:
        self._inbox.call(rid, "finish", Finish(Rid(rid), output))

    def retract(self, rid: str, output: bytes) -> None:
        """As `Driver.retract`."""
        check_comes_back(self._agreed, self.config, rid, output)
        self._inbox.call(rid, "retract", Retract(Rid(rid), output))

    def resume(self, rid: str) -> None:
        self._inbox.call(rid, "resume", Resume(Rid(rid)))

    def flush(self, tiers: Sequence[Tier]) -> None:
        for tier in [Tier(each) for each in tiers]:  # all of them, or a ValueError for none
            self._inbox.append(Flush(tier))

    def grow(self, rid: str, n_pages: int) -> Growth:
        """As `Driver.grow`; its effects go out with the next orders."""
        if n_pages < 1:
            raise ValueError(f"grow by at least one page, not {n_pages}")
        if self._inbox.is_leaving(rid):
            raise RequestLeaving(rid)
        n_waiting = len(self._agreed.growths)
        try:
            self._agreed, decision, pages = grow_agreed(
                self._agreed, Rid(rid), n_pages, self._policy
            )
        except LookupError:
            raise UnknownRequest(rid, "grow") from None
        self._late.append(decision)
        self._account(decision)
        self._observer.grew(self.state, rid, n_pages, decision, self._clock.now_ns())
        if pages is not None:
            return Granted(device_pages=tuple(self._device.resolve(pages)))
        return Pending() if len(self._agreed.growths) > n_waiting else NoRoom()

    def tick(self, ballots: Sequence[Sequence[int]]) -> tuple[Tick, Orders]:
        """One round. `ballots`: every worker's answer to the last orders, if they were awaited.

        Raises `RanksDiverged`, `RankFailed`: end the workers. Raises `ValueError` where there are
        more or fewer ballots than at the first time, and nothing has happened then: what the others
        say is no word about the worker that is missing."""
        if ballots:
            self._n_workers = self._n_workers or len(ballots)
            if len(ballots) != self._n_workers:
                raise ValueError(
                    f"{len(ballots)} ballots of {self._n_workers} workers: wait for all of them"
                )
        self._observer.began()
        done = Round(self._clock.now_ns())
        try:
            return self._tick(ballots, done)
        except Exception as error:
            self._observer.raised(self.state, done, error)
            raise

    def _tick(self, ballots: Sequence[Sequence[int]], done: Round) -> tuple[Tick, Orders]:
        verdict = None
        if ballots:
            done.least = self._reduced(ballots)
            done.during = "judging"
            verdict = from_wire(done.least, self._voted, self._policy)
        done.calls = self._inbox.take()
        done.during = "deciding"
        self._agreed, decision = advance_agreed(self._agreed, verdict, done.calls, self._policy)
        self._voted = self._agreed
        done.during = "telling"
        self._observer.ticked(self.state, done.now_ns, (), done.least, done.calls, decision)
        self._account(decision)
        is_busy = is_under_way(self._agreed)
        tick = tick_of(self.state, Local(), decision, self._device, is_busy=is_busy)
        for ended in tick.ended:
            self._inbox.has_ended(ended.rid)
        self._observer.told(self.state, tick)
        decided = [*self._late, decision]
        self._late = []
        return tick, self._orders(decided)

    def _reduced(self, ballots: Sequence[Sequence[int]]) -> tuple[int, ...]:
        return tuple(min(values) for values in zip(*ballots, strict=True))

    def _orders(self, decided: Sequence[Decision]) -> Orders:
        return Orders(
            effects=tuple(effect for d in decided for effect in d.effects),
            closed=tuple(ticket for d in decided for ticket in d.closed),
            proofs=proofs(self._agreed),
            tickets=slots(self._agreed, self._policy),
            is_awaited=is_under_way(self._agreed),
        )

    def _account(self, decision: Decision) -> None:
        """Follow the workers' page table, which is the same on all of them."""
        for effect in decision.effects:
            if isinstance(effect, TakeDevice):
                self._device.take(effect.pages)
            elif isinstance(effect, FreeDevice):
                self._device.free(effect.pages)

    def hit(self, prompt: Prompt) -> Hit:
        return match(self._agreed.index, prompt)

    @property
    def state(self) -> State:
        """The core's state, its agreed half; a value, safe to keep."""
        return State(agreed=self._agreed, local=Local())

    def close(self) -> None:
        """The observer's last word; the workers are closed by themselves."""
        self._observer.close()
