"""The scheduler's half for a host whose own cache owns the device's pages (decision 0015).

    submit(n_pages_given)  ->  plan_of: what kvlift can bring      (leased from here on)
    place(blocks)          ->  the loads start, the peer hears what it need not send
    stow(blocks)           ->  pages that the host has computed go down, from where they are

Each block that is lent is `held`, and `released` when nothing of kvlift reads or writes it any
more: as often as it was held, so that a host with reference counts needs nothing else.
"""

from collections.abc import Callable, Sequence

from attrs import evolve

from kvlift.core.admission import hit_in
from kvlift.core.adopt import stow_agreed
from kvlift.core.advance import Decision
from kvlift.core.agreed import is_under_way
from kvlift.core.ballot import slots
from kvlift.core.ids import Rid
from kvlift.core.index import Hit
from kvlift.core.phase import Filling, Ready
from kvlift.core.plan import Plan
from kvlift.core.policy import Switch
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier
from kvlift.effects.ports import Clock
from kvlift.runtime.config import Config, ConfigError
from kvlift.runtime.errors import UnknownRequest
from kvlift.runtime.hosted import Orders, Scheduler
from kvlift.runtime.observer import Adoption, Observer
from kvlift.runtime.places import LentPages, Places
from kvlift.runtime.tick import Tick


class LendingScheduler(Scheduler):
    """A `Scheduler` whose device pages are the host's. `config.device_tier` has to be off."""

    def __init__(
        self,
        config: Config,
        *,
        storage: Switch,
        held: Callable[[Sequence[int]], None],
        released: Callable[[Sequence[int]], None],
        observer: Observer | None = None,
        clock: Clock | None = None,
    ) -> None:
        if config.device_tier is Switch.ON:
            raise ConfigError("a host that lends its device pages needs device_tier=off")
        super().__init__(config, storage=storage, observer=observer, clock=clock)
        assert isinstance(self._device, LentPages)
        self._places = Places(self._device, held, released)
        self._is_placed = False

    def hit_from(self, prompt: Prompt, n_pages_given: int) -> Hit:
        """What a submission would find on the host behind what the host has; starts nothing."""
        return hit_in(self._agreed.index, prompt, n_pages_given, self._policy)

    def plan_of(self, rid: str) -> Plan | None:
        """What a request has been promised, and is leased. None: not yet, or not any more."""
        found = self._admitted(rid)
        return None if found is None else found.plan

    def is_known(self, rid: str) -> bool:
        """Submitted, and not ended for its user."""
        return self._inbox.is_alive(rid)

    def is_over(self, rid: str) -> bool:
        """Nothing of any attempt of this request reads or writes a page any more."""
        return all(request.rid != rid for request in self._agreed.requests.values())

    def place(self, rid: str, blocks: Sequence[int]) -> None:
        """The blocks of the first pages of a request that has its plan, the given ones included.

        Raises `UnknownRequest`."""
        phase = self._admitted(rid)
        if phase is None:
            raise UnknownRequest(rid, "place")
        self._places.lend(phase.lease.own[: len(blocks)], blocks)
        self._places.place(Rid(rid))
        self._is_placed = True

    def stow(self, prompt: Prompt, start: int, blocks: Sequence[int]) -> None:
        """Take down the pages from `start` on, which lie in these blocks and are good."""
        self._agreed, decision, adopted = stow_agreed(
            self._agreed, prompt, start, start + len(blocks), self._policy
        )
        self._late.append(decision)
        what = Adoption(Tier.DEVICE, prompt, start, start + len(blocks), is_stow=True)
        self._observer.adopted(self.state, what, decision, self._clock.now_ns())
        self._places.lend(adopted.device, [blocks[page - start] for page in adopted.positions])

    def has_news(self) -> bool:
        """Something was called that no tick has taken yet."""
        return self._is_placed or bool(self._late) or self._inbox.has_calls()

    def is_busy(self) -> bool:
        return is_under_way(self._agreed)

    def tick(self, ballots: Sequence[Sequence[int]]) -> tuple[Tick, Orders]:
        tick, orders = super().tick(ballots)
        for ended in tick.ended:
            self._places.forget(Rid(ended.rid))
        return tick, orders

    def _admitted(self, rid: str) -> Filling | Ready | None:
        attempt = self._agreed.attempt_by_rid.get(Rid(rid))
        phase = None if attempt is None else self._agreed.requests[attempt].phase
        return phase if isinstance(phase, Filling | Ready) else None

    def _reduced(self, ballots: Sequence[Sequence[int]]) -> tuple[int, ...]:
        asked = slots(self._voted, self._policy)
        return self._places.answered(super()._reduced(ballots), asked, self._voted.tickets)

    def _account(self, decision: Decision) -> None:
        """`Places` follows the effects, in `_orders`."""

    def _orders(self, decided: Sequence[Decision]) -> Orders:
        orders = super()._orders(decided)
        self._is_placed = False
        going = self._places.passed(orders.effects)
        self._places.closed(orders.closed)
        return evolve(orders, effects=going, lent=self._places.fresh())
