"""The driver that a decode scheduler embeds. One `tick()` a scheduling step, on every rank.

    1. hear: collect what landed here, and turn local deadlines into observations
    2. agree: take the verdict of the ballot that was sent last tick
    3. advance: decide; pure, equal on all ranks
    4. run: start the effects of the plan
    5. vote: send the ballot whose reduction runs while the host decodes

The driver is a guest: `tick` does not block on storage, copies, sockets or peers. It waits for a
late rank alone, and only up to `ballot_deadline_ms`.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvlift.core.adopt import adopt_agreed
from kvlift.core.advance import State, advance, grow_agreed
from kvlift.core.agreed import agreed_at_start, is_under_way
from kvlift.core.ballot import RankFailed, RanksDiverged, Verdict, from_wire, proofs, slots
from kvlift.core.ids import Rid
from kvlift.core.index import Hit, match
from kvlift.core.policy import Switch
from kvlift.core.prompt import Prompt
from kvlift.core.submission import (
    Abort,
    AttachStorage,
    DetachStorage,
    Finish,
    Flush,
    Resume,
    Retract,
    Run,
    Submission,
)
from kvlift.core.tier import Tier
from kvlift.effects.pages import PageTable
from kvlift.runtime.answers import check_comes_back
from kvlift.runtime.config import Config, ConfigError
from kvlift.runtime.divergence import explained
from kvlift.runtime.errors import DriverClosed, RequestLeaving, UnknownRequest
from kvlift.runtime.inbox import Inbox
from kvlift.runtime.interpret import Ports
from kvlift.runtime.observer import Adoption, Observer, Round, SilentObserver
from kvlift.runtime.rank_half import RankHalf
from kvlift.runtime.snapshot import Snapshot, snapshot_of
from kvlift.runtime.telling import tick_of
from kvlift.runtime.tick import Granted, Growth, NoRoom, Pending, Tick

BALLOT_WAIT_S = 0.002


class Driver:
    """The tiered cache of one decode rank. Use as a context manager.

    `submit` and `abort` may be called from any thread; all else from the scheduler's. In lock step
    every rank gives its driver the same calls in the same order between the same ticks. Calls take
    effect at the next tick, `grow` at once.
    """

    def __init__(self, config: Config, ports: Ports, observer: Observer | None = None) -> None:
        self.config = config
        self._observer: Observer = observer or SilentObserver()
        self._half = RankHalf(config, ports, self._observer)
        self._inbox = Inbox(config, ports.wakeup)
        self._policy = config.policy()
        self._limits = config.limits()
        self._agreed = agreed_at_start(
            self._policy, Switch.OFF if ports.store is None else Switch.ON
        )
        self._is_ballot_out = False
        self._voted = self._agreed
        self._n_ballots = 0
        self._is_closed = False

    # Calls of the host.

    def submit(
        self,
        rid: str,
        prompt: Prompt,
        *,
        peer: str,
        priority: int = 0,
        n_pages_output: int = 0,
    ) -> None:
        """Announce a request; its prefill node hears of it at the next tick.

        Raises `DuplicateRequest`, `PromptTooLong`, `TooManyRequests`, `DriverClosed`; nothing has
        happened then."""
        if self._is_closed:  # It would never end, and whoever waits for it neither.
            raise DriverClosed
        self._inbox.submit(rid, prompt, peer=peer, priority=priority, n_pages_output=n_pages_output)

    def abort(self, rid: str) -> None:
        """The user has hung up. Raises `UnknownRequest`."""
        self._inbox.call(rid, "abort", Abort(Rid(rid)))

    def run(self, rid: str) -> None:
        """The scheduler takes a ready request into its batch."""
        self._inbox.call(rid, "run", Run(Rid(rid)))

    def finish(self, rid: str, output: bytes) -> None:
        """Decoding has ended. `output`: every sampled token, the first too, little-endian int32."""
        self._inbox.call(rid, "finish", Finish(Rid(rid), output))

    def retract(self, rid: str, output: bytes) -> None:
        """Give a running request up; `output` as in `finish`. Always succeeds.

        The KV of every token but the last must have been computed: a request that `needs_prefill`
        may be retracted again only after that. Raises `PromptTooLong` for an answer that the device
        has no room for: its request could never come back."""
        check_comes_back(self._agreed, self.config, rid, output)
        self._inbox.call(rid, "retract", Retract(Rid(rid), output))

    def resume(self, rid: str) -> None:
        """Want a retracted request back; it becomes ready again."""
        self._inbox.call(rid, "resume", Resume(Rid(rid)))

    def flush(self, tiers: Sequence[Tier]) -> None:
        """Forget these tiers: at once what nothing uses, the rest as soon as it is let go."""
        for tier in [Tier(each) for each in tiers]:  # all of them, or a ValueError for none
            self._inbox.append(Flush(tier))

    def detach_storage(self) -> None:
        """No more reads from or writes to storage; requests that count on it turn to their peer."""
        self._inbox.append(DetachStorage())

    def attach_storage(self) -> None:
        """After a detach. Raises `ConfigError` where there is no store that could answer."""
        if self._half.ports.store is None:
            raise ConfigError("there is no store to attach: make a driver whose Ports have one")
        self._inbox.append(AttachStorage())

    def grow(self, rid: str, n_pages: int) -> Growth:
        """More pages for a running request, answered at once. Raises a `RequestError`."""
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
        now_ns = self._half.ports.clock.now_ns()
        self._half.order(decision.effects, decision.closed, now_ns)
        self._observer.grew(self.state, rid, n_pages, decision, now_ns)
        if pages is not None:
            return Granted(device_pages=tuple(self._half.device.resolve(pages)))
        return Pending() if len(self._agreed.growths) > n_waiting else NoRoom()

    def adopt(self, tier: Tier, prompt: Prompt, start: int, stop: int) -> dict[int, int]:
        """Places for pages [start, stop) of a prompt that are good already (a warm start).

        On all ranks alike, between ticks. The physical page of each position that the tier lacked;
        the caller fills them before the next tick. Raises `LookupError` when there is no room."""
        self._agreed, decision, adopted = adopt_agreed(
            self._agreed, tier, prompt, start, stop, self._policy
        )
        now_ns = self._half.ports.clock.now_ns()
        self._half.order(decision.effects, decision.closed, now_ns)
        self._observer.adopted(self.state, Adoption(tier, prompt, start, stop), decision, now_ns)
        device, host = self._half.device, self._half.host
        pages = device.resolve(adopted.device) or host.resolve(adopted.host)
        return dict(zip(adopted.positions, pages, strict=True))

    def reconfigure(self, config: Config) -> None:
        """Other choices and limits from the next tick on, on all ranks alike; sizes must stay."""
        for name in ("page_tokens", "device_pages", "host_pages", "ballot_slots", "device_tier"):
            if getattr(config, name) != getattr(self.config, name):
                raise ConfigError(f"{name} can't change while the driver runs: make a new one")
        self.config = config
        self._policy = config.policy()
        self._limits = config.limits()
        self._inbox.reconfigure(config)
        self._half.reconfigure(config)
        self._observer.reconfigured(config)

    def set_aside(self, tier: Tier, n_pages: int) -> None:
        """`n_pages` of a tier are somebody else's on this rank. Replaces the last word."""
        self._half.set_aside(tier, n_pages)

    # The tick.

    def tick(self) -> Tick:
        """One round. `RanksDiverged`, `RankLate`, `RankLost`, `RankFailed` end the group."""
        if self._is_closed:
            raise DriverClosed
        self._observer.began()
        done = Round(self._half.ports.clock.now_ns())
        try:
            return self._tick(done)
        except Exception as error:
            self._observer.raised(self.state, done, error)
            raise

    def _tick(self, done: Round) -> Tick:
        half, now_ns = self._half, done.now_ns
        half.begin_tick()
        done.reports = half.hear(now_ns)
        verdict = self._agree(done)
        done.calls = calls = self._calls(verdict)
        done.during = "deciding"
        before = half.local
        state, outcome = advance(
            self.state, verdict, calls, policy=self._policy, limits=self._limits, now_ns=now_ns
        )
        self._agreed = state.agreed
        done.during = "telling"
        self._observer.ticked(state, now_ns, done.reports, done.least, calls, outcome.decision)
        half.run_ordered(state.local, outcome.starts)
        self._vote()
        tick = tick_of(
            state,
            before,
            outcome.decision,
            half.device,
            is_busy=self._is_ballot_out,
            first_token=self._policy.first_token,
        )
        for ended in tick.ended:
            self._inbox.has_ended(ended.rid)
        self._observer.told(self.state, tick)
        return tick

    def _agree(self, done: Round) -> Verdict | None:
        if not self._is_ballot_out:
            return None
        ranks = self._half.ports.ranks
        done.during = "waiting"
        self._observer.waiting()
        done.least = ranks.verdict()
        self._observer.waited()
        self._is_ballot_out = False
        done.during = "judging"
        try:
            return from_wire(done.least, self._voted, self._policy)
        except RanksDiverged as error:
            raise explained(error, self._agreed, ranks) from error
        except RankFailed as error:
            raise error from self._half.fault

    def _calls(self, verdict: Verdict | None) -> tuple[Submission, ...]:
        """What was submitted; with idle ballots, what every rank is known to have been given."""
        if self.config.idle_ballots is Switch.OFF:
            return self._inbox.take()
        return self._inbox.take(0 if verdict is None else verdict.n_submissions)

    def _vote(self) -> None:
        # The others send none while nothing is under way: a fault of this rank is told in the next
        # one that all send. Sent alone, it would wait for them and then blame them.
        is_telling = not self._half.is_healthy and self._half.ports.ranks.n_ranks == 1
        is_needed = is_under_way(self._agreed) or is_telling
        self._n_ballots = 0
        if not is_needed and self.config.idle_ballots is Switch.OFF:
            return
        ballot = self._half.ballot(
            proofs(self._agreed), slots(self._agreed, self._policy), self._inbox.n_known()
        )
        self._half.ports.ranks.send(ballot)
        self._is_ballot_out, self._voted = True, self._agreed
        self._n_ballots = 1

    # Looking in, and leaving.

    def wait(self, timeout_s: float) -> bool:
        """For a host with an empty batch: sleep until something lands or is submitted.

        Returns at the next local deadline at the latest; False where nothing has happened here.
        While a ballot is out, what has landed on another rank is known from its verdict alone:
        then the sleep is at most `BALLOT_WAIT_S`, and the host should tick again."""
        if self._is_ballot_out:
            timeout_s = min(timeout_s, BALLOT_WAIT_S)
        return self._half.wait(timeout_s)

    def snapshot(self) -> Snapshot:
        half = self._half
        return snapshot_of(
            self._agreed,
            device_pages_rank=half.device.n_pages,
            host_pages_rank=half.host.n_pages,
            device_aside=half.aside[Tier.DEVICE],
            host_aside=half.aside[Tier.HOST],
            n_ballots=self._n_ballots,
            effects=dict(half.n_started),
            n_stale=half.local.n_stale,
        )

    def hit(self, prompt: Prompt) -> Hit:
        """What a fresh match would find on the device and on the host now; starts nothing."""
        return match(self._agreed.index, prompt)

    def page_table(self, tier: Tier) -> PageTable:
        """The physical pages of this rank behind the handles of DEVICE or HOST; to look at."""
        return self._half.device if tier is Tier.DEVICE else self._half.host

    @property
    def state(self) -> State:
        """The core's state; a value, safe to keep."""
        return State(agreed=self._agreed, local=self._half.local)

    def close(self) -> bool:
        """Wait for running copies, reads and writes up to `close_deadline_ms`, then let go.

        False when something still runs: then its memory stays mapped."""
        if self._is_closed:
            return True
        self._is_closed = True
        is_quiet = self._half.close(self.config.close_deadline_ms / 1000)
        self._observer.close()
        return is_quiet

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
