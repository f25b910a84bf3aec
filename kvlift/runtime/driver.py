"""The driver that a decode scheduler embeds. One `tick()` a scheduling step, on every rank.

    1. hear: collect what landed here, and turn local deadlines into observations
    2. agree: take the verdict of the ballot that was sent last tick
    3. advance: decide; pure, equal on all ranks
    4. run: start the effects of the plan
    5. vote: send the ballot whose reduction runs while the host decodes

The driver is a guest: `tick` does not block on storage, copies, sockets or peers. It waits for a
late rank alone, and only up to `ballot_deadline_ms`.
"""

import threading
from collections import Counter, deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvlift.core.adopt import adopt_agreed
from kvlift.core.advance import Decision, State, advance, grow_agreed
from kvlift.core.agreed import agreed_at_start, is_under_way
from kvlift.core.ballot import Room, Verdict, from_wire, slots, to_wire
from kvlift.core.effect import Effect
from kvlift.core.hear import hear, order
from kvlift.core.ids import Rid
from kvlift.core.index import Hit, match
from kvlift.core.landed import Landed
from kvlift.core.local import Local, seen
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
    Submit,
)
from kvlift.core.tier import Tier
from kvlift.effects.pages import PageTable
from kvlift.runtime.config import Config, ConfigError
from kvlift.runtime.errors import (
    DriverClosed,
    DuplicateRequest,
    PromptTooLong,
    TooManyRequests,
    UnknownRequest,
)
from kvlift.runtime.interpret import Ports, run_effect
from kvlift.runtime.observer import Observer, SilentObserver
from kvlift.runtime.snapshot import Snapshot, snapshot_of
from kvlift.runtime.telling import tick_of
from kvlift.runtime.tick import Granted, Growth, NoRoom, Pending, Tick


class Driver:
    """The tiered cache of one decode rank. Use as a context manager.

    `submit` and `abort` may be called from any thread; all else from the scheduler's. In lock step
    every rank gives its driver the same calls in the same order between the same ticks. Calls take
    effect at the next tick, `grow` at once.
    """

    def __init__(self, config: Config, ports: Ports, observer: Observer | None = None) -> None:
        self.config = config
        self._ports = ports
        self._observer: Observer = observer or SilentObserver()
        self._policy = config.policy()
        self._limits = config.limits()
        storage = Switch.OFF if ports.store is None else Switch.ON
        agreed = agreed_at_start(self._policy, storage)
        self._state = State(agreed=agreed, local=Local())
        self._device = PageTable(config.device_pages)
        self._host = PageTable(config.host_pages)
        self._aside = {Tier.DEVICE: 0, Tier.HOST: 0}
        self._inbox: deque[Submission] = deque()
        self._alive: set[str] = set()
        self._lock = threading.Lock()
        self._n_calls = 0
        self._is_ballot_out = False
        self._is_healthy = True
        self._is_closed = False
        self._n_ballots = 0
        self._ran: Counter[str] = Counter()

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

        Raises `DuplicateRequest`, `PromptTooLong`, `TooManyRequests`; nothing has happened then."""
        n_pages = prompt.n_pages + n_pages_output
        if n_pages > self.config.device_pages:
            raise PromptTooLong(rid, n_pages, self.config.device_pages)
        if prompt.page_tokens != self.config.page_tokens:
            raise ValueError(
                f"the prompt's pages have {prompt.page_tokens} tokens, "
                f"the cache's {self.config.page_tokens}"
            )
        if prompt.n_tokens == 0:
            raise ValueError(f"request {rid!r} has an empty prompt")
        with self._lock:
            if rid in self._alive:
                raise DuplicateRequest(rid)
            if len(self._alive) >= self.config.requests_max:
                raise TooManyRequests(self.config.requests_max)
            self._alive.add(rid)
            self._inbox.append(
                Submit(
                    rid=Rid(rid),
                    prompt=prompt,
                    peer=peer,
                    priority=priority,
                    n_pages_output=n_pages_output,
                )
            )

    def abort(self, rid: str) -> None:
        """The user has hung up. Raises `UnknownRequest`."""
        self._call(rid, "abort", Abort(Rid(rid)))

    def run(self, rid: str) -> None:
        """The scheduler takes a ready request into its batch."""
        self._call(rid, "run", Run(Rid(rid)))

    def finish(self, rid: str, output: bytes) -> None:
        """Decoding has ended. `output`: every sampled token, the first too, little-endian int32."""
        self._call(rid, "finish", Finish(Rid(rid), output))

    def retract(self, rid: str, output: bytes) -> None:
        """Give a running request up; `output` as in `finish`. Always succeeds."""
        self._call(rid, "retract", Retract(Rid(rid), output))

    def resume(self, rid: str) -> None:
        """Want a retracted request back; it becomes ready again."""
        self._call(rid, "resume", Resume(Rid(rid)))

    def flush(self, tiers: Sequence[Tier]) -> None:
        """Forget these tiers: at once what nothing uses, the rest as soon as it is let go."""
        for tier in tiers:
            self._append(Flush(tier))

    def detach_storage(self) -> None:
        """No more reads from or writes to storage; requests that count on it turn to their peer."""
        self._append(DetachStorage())

    def attach_storage(self) -> None:
        self._append(AttachStorage())

    def grow(self, rid: str, n_pages: int) -> Growth:
        """More pages for a running request, answered at once. Raises `UnknownRequest`."""
        if n_pages < 1:
            raise ValueError(f"grow by at least one page, not {n_pages}")
        try:
            agreed, decision, pages = grow_agreed(
                self._state.agreed, Rid(rid), n_pages, self._policy
            )
        except LookupError:
            raise UnknownRequest(rid, "grow") from None
        now_ns = self._ports.clock.now_ns()
        was_waiting = len(self._state.agreed.growths)
        local, starts = order(
            self._state.local, self._limits, decision.effects, decision.closed, now_ns
        )
        self._state = State(agreed=agreed, local=local)
        self._observer.grew(rid, n_pages, decision, now_ns)
        self._run(starts)
        if pages is not None:
            return Granted(device_pages=tuple(self._device.resolve(pages)))
        return Pending() if len(agreed.growths) > was_waiting else NoRoom()

    def adopt(self, tier: Tier, prompt: Prompt, start: int, stop: int) -> dict[int, int]:
        """Places for pages [start, stop) of a prompt that are good already (a warm start).

        On all ranks alike, between ticks. The physical page of each position that the tier lacked;
        the caller fills them before the next tick. Raises `LookupError` when there is no room."""
        agreed, decision, adopted = adopt_agreed(
            self._state.agreed, tier, prompt, start, stop, self._policy
        )
        self._state = State(agreed=agreed, local=self._state.local)
        self._run(decision.effects)
        pages = self._device.resolve(adopted.device) or self._host.resolve(adopted.host)
        return dict(zip(adopted.positions, pages, strict=True))

    def reconfigure(self, config: Config) -> None:
        """Other choices and limits from the next tick on, on all ranks alike; sizes must stay."""
        for name in ("page_tokens", "device_pages", "host_pages", "ballot_slots"):
            if getattr(config, name) != getattr(self.config, name):
                raise ConfigError(f"{name} can't change while the driver runs: make a new one")
        self.config = config
        self._policy = config.policy()
        self._limits = config.limits()

    def set_aside(self, tier: Tier, n_pages: int) -> None:
        """`n_pages` of a tier are somebody else's on this rank. Replaces the last word."""
        self._aside[tier] = n_pages

    def _call(self, rid: str, name: str, call: Submission) -> None:
        with self._lock:
            if rid not in self._alive:
                raise UnknownRequest(rid, name)
            self._inbox.append(call)

    def _append(self, call: Submission) -> None:
        with self._lock:
            self._inbox.append(call)

    # The tick.

    def tick(self) -> Tick:
        """One round. `RanksDiverged`, `RankLate`, `RankLost`, `RankFailed` end the group."""
        if self._is_closed:
            raise DriverClosed
        now_ns = self._ports.clock.now_ns()
        self._ran = Counter()
        reports = self._hear(now_ns)
        least, verdict = self._agree()
        calls = self._calls(verdict)
        before = self._state.local
        self._state, outcome = advance(
            self._state, verdict, calls, policy=self._policy, limits=self._limits, now_ns=now_ns
        )
        self._observer.ticked(self._state, now_ns, reports, least, calls, outcome.decision)
        self._run(outcome.starts)
        self._vote()
        return self._tell(outcome.decision, before)

    def _hear(self, now_ns: int) -> list[Landed]:
        ports = self._ports
        reports = [*ports.copies.landed(), *ports.peers.landed()]
        if ports.store is not None:
            reports += ports.store.landed()
        local, starts = hear(self._state.local, self._limits, reports, now_ns)
        self._state = State(agreed=self._state.agreed, local=local)
        self._run(starts)
        return reports

    def _agree(self) -> tuple[tuple[int, ...] | None, Verdict | None]:
        if not self._is_ballot_out:
            return None, None
        least = self._ports.ranks.verdict()
        self._is_ballot_out = False
        return least, from_wire(least, self._state.agreed, self._policy)

    def _calls(self, verdict: Verdict | None) -> tuple[Submission, ...]:
        """What was submitted; with idle ballots, what every rank is known to have been given."""
        with self._lock:
            n_calls = len(self._inbox)
            if self.config.idle_ballots is Switch.ON:
                known = 0 if verdict is None else verdict.n_submissions - self._n_calls
                n_calls = max(0, min(n_calls, known))
            self._n_calls += n_calls
            return tuple(self._inbox.popleft() for _ in range(n_calls))

    def _run(self, starts: Sequence[Effect]) -> None:
        """A failure of our own becomes a bit in the next ballot, never a skipped one."""
        for effect in starts:
            self._ran[type(effect).__name__] += 1
            try:
                run_effect(effect, self._ports, self._device, self._host)
            except Exception as error:  # noqa: BLE001 - a bug of a port, told to all ranks
                self._is_healthy = False
                self._observer.failed(effect, error)

    def _vote(self) -> None:
        agreed = self._state.agreed
        is_needed = is_under_way(agreed) or not self._is_healthy
        self._n_ballots = 0
        if not is_needed and self.config.idle_ballots is Switch.OFF:
            return
        with self._lock:
            n_submissions = self._n_calls + len(self._inbox)
        ballot = to_wire(
            agreed,
            self._policy,
            room=self._room(),
            rates=self._state.local.rates,
            is_healthy=self._is_healthy,
            n_submissions=n_submissions,
            seen=seen(self._state.local, slots(agreed, self._policy)),
        )
        self._ports.ranks.send(ballot)
        self._is_ballot_out = True
        self._n_ballots = 1

    def _room(self) -> Room:
        return Room(
            device=self._device.n_pages - self._aside[Tier.DEVICE],
            host=self._host.n_pages - self._aside[Tier.HOST],
        )

    def _tell(self, decision: Decision, before: Local) -> Tick:
        tick = tick_of(self._state, before, decision, self._device, is_busy=self._is_ballot_out)
        with self._lock:
            for ended in tick.ended:
                self._alive.discard(ended.rid)
        return tick

    # Looking in, and leaving.

    def snapshot(self) -> Snapshot:
        return snapshot_of(
            self._state.agreed,
            device_pages_rank=self._device.n_pages,
            host_pages_rank=self._host.n_pages,
            device_aside=self._aside[Tier.DEVICE],
            host_aside=self._aside[Tier.HOST],
            n_ballots=self._n_ballots,
            effects=dict(self._ran),
            n_stale=self._state.local.n_stale,
        )

    def hit(self, prompt: Prompt) -> Hit:
        """What a fresh match would find on the device and on the host now; starts nothing."""
        return match(self._state.agreed.index, prompt)

    def resolve_device(self, handles: Sequence[int]) -> list[int]:
        """Physical pages behind the handles of a snapshot."""
        return self._device.resolve(handles)

    @property
    def state(self) -> State:
        """The core's state; a value, safe to keep."""
        return self._state

    def close(self) -> bool:
        """Wait for running copies, reads and writes up to `close_deadline_ms`, then let go.

        False when something still runs: then its memory stays mapped."""
        if self._is_closed:
            return True
        self._is_closed = True
        deadline_s = self.config.close_deadline_ms / 1000
        ports = self._ports
        is_quiet = ports.peers.close(deadline_s)
        if ports.store is not None:
            is_quiet = ports.store.close(deadline_s) and is_quiet
        is_quiet = ports.copies.close(deadline_s) and is_quiet
        ports.ranks.close()
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
