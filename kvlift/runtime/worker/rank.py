"""One decode rank: the driver, a shard of the model, and the loop that keeps the ranks in step.

    python -m kvlift.runtime.worker.rank    (orders on standard input)

Each iteration, on every rank: hear rank 0's beat, take the last step's tokens, obey the commands,
tick, compute one step. The ballot's reduction and the copies run beside the step.
"""

import contextlib
import sys
import threading
from collections import Counter
from typing import Final

import attrs
import torch
import torch.distributed as dist
import zmq
from attrs import define, field

from kvlift.core.keys import Namespace
from kvlift.core.tier import Tier
from kvlift.effects.ports import RankLost
from kvlift.effects.wire_io import Waker
from kvlift.runtime.driver import Driver
from kvlift.runtime.metrics import Metrics, NoMetrics
from kvlift.runtime.observers import observers_for
from kvlift.runtime.worker.audit import Audit
from kvlift.runtime.worker.beats import SILENCE_S, BeatReceiver, BeatSender
from kvlift.runtime.worker.child import Channel, live
from kvlift.runtime.worker.decode_engine import DecodeEngine
from kvlift.runtime.worker.decoding import Row
from kvlift.runtime.worker.generation import Request
from kvlift.runtime.worker.loading import ModelSource
from kvlift.runtime.worker.messages import (
    AbortRequested,
    Answered,
    Beat,
    Command,
    DamageRequested,
    Delivered,
    FlushRequested,
    MetricsAsked,
    ScoreAsked,
    Started,
    StatsAsked,
    StopRequested,
    StorageSwitched,
    Submitted,
    Verifying,
)
from kvlift.runtime.worker.model import Decoder, PagedKv
from kvlift.runtime.worker.rank_ports import (
    RankPorts,
    driver_config,
    model_all_reduce,
    open_ports,
)
from kvlift.runtime.worker.settings import ProcessOrders
from kvlift.runtime.worker.weights import Shard

LANDING_WAIT_S: Final = 0.002
"""How long rank 0 sleeps at most while something is under way: what lands on another rank does not
wake it."""


@define(eq=False)
class RankLoop:
    """`channel` and `waker` are this rank's; rank 0 has the sender, the others the receiver."""

    orders: ProcessOrders
    driver: Driver
    engine: DecodeEngine
    parts: RankPorts
    metrics: Metrics | NoMetrics
    channel: Channel
    waker: Waker
    stop: threading.Event
    sender: BeatSender | None
    receiver: BeatReceiver | None
    _n_beats: int = field(default=0, init=False)
    _n_ticks: int = field(default=0, init=False)
    _n_ballots_most: int = field(default=0, init=False)
    _rows: list[Row] = field(factory=list, init=False)
    _sampled: list[tuple[int, float]] = field(factory=list, init=False)
    _poller: zmq.Poller = field(factory=zmq.Poller, init=False)
    _is_busy: bool = field(default=False, init=False)

    def run(self) -> None:
        """Until told to stop. Raises `RankLate`, `RankLost`, `RanksDiverged`, `RankFailed`."""
        self._poller.register(self.waker.fileno(), zmq.POLLIN)
        self._poller.register(self.channel.socket, zmq.POLLIN)
        while True:
            beat = self._next_beat()
            if beat is None:
                return
            self.engine.accept(self._rows, beat.tokens)
            if any(isinstance(command, StopRequested) for command in beat.commands):
                return
            for command in beat.commands:
                self._obey(command)
            self._tick()
            self._deliver()
            self._rows = self.engine.rows()
            self._sampled = self._computed()

    def _next_beat(self) -> Beat | None:
        self._n_beats += 1
        if self.receiver is not None:
            beat = self.receiver.receive()
            if beat is not None and beat.number != self._n_beats:
                raise RankLost((0,), f"it sent beat {beat.number} in place of {self._n_beats}")
            return beat
        commands = self._commands()
        if self.stop.is_set():
            commands.append(StopRequested())
        beat = Beat(self._n_beats, self._sampled, commands)
        if self.sender is not None:
            self.sender.send(beat)
        return beat

    def _commands(self) -> list[Command]:
        """New commands; sleeps while there is nothing to compute."""
        if not self._rows:
            is_waiting = self._is_busy or self.engine.n_live > 0
            self._poller.poll(int((LANDING_WAIT_S if is_waiting else SILENCE_S / 2) * 1000))
            self.waker.rest()
        return self.channel.commands(0.0)

    def _tick(self) -> None:
        n_before = self.parts.ranks.n_sent
        self._is_busy = self.engine.tick()
        self._n_ticks += 1
        self._n_ballots_most = max(self._n_ballots_most, self.parts.ranks.n_sent - n_before)

    def _deliver(self) -> None:
        outputs = self.engine.taken_outputs()
        if outputs and self.engine.samples:
            self.channel.tell(Delivered(outputs=outputs))

    def _computed(self) -> list[tuple[int, float]]:
        try:
            return self.engine.compute(self._rows)
        except RuntimeError as error:
            if self.orders.settings.n_ranks == 1:
                raise
            # gloo says that somebody did not come, the store says who.
            self.parts.ranks.exchange(b"a step's sum failed")
            raise RankLost((), f"a step's sum over the ranks failed: {error}") from error

    def _obey(self, command: Command) -> None:
        match command:
            case Submitted(request=request):
                self.engine.submit(request)
            case AbortRequested(rid=rid):
                self.engine.abort(rid)
            case FlushRequested(tiers=tiers):
                self.driver.flush([Tier(tier) for tier in tiers])
            case StorageSwitched(is_attached=is_attached):
                if is_attached:
                    self.driver.attach_storage()
                else:
                    self.driver.detach_storage()
            case Verifying(is_on=is_on):
                self.engine.audit.is_on = is_on
            case DamageRequested():
                self.engine.audit.damages_next = True
            case StatsAsked(number=number):
                self.engine.audit.compare_pending()
                self.channel.tell(Answered(number=number, value=self.stats()))
            case MetricsAsked(number=number):
                text = self.metrics.exposition().decode()
                self.channel.tell(Answered(number=number, value=text))
            case ScoreAsked() | StopRequested():
                raise ValueError(f"a decode rank cannot obey {type(command).__name__}")

    def stats(self) -> dict[str, object]:
        """Plain values. `leaks`: pages that nobody should hold, once nothing is under way."""
        seen, audit = self.driver.snapshot(), self.engine.audit
        leaks = None
        if seen.is_idle() and not seen.requests:
            leaks = (
                seen.device.owned
                + seen.device.draining
                + seen.host.owned
                + seen.host.reserved
                + seen.host.draining
            )
        return {
            "rank": self.orders.rank,
            "ticks": self._n_ticks,
            "ballots": self.parts.ranks.n_sent,
            "ballots_per_tick_max": self._n_ballots_most,
            "bytes_from_peer": self.parts.received.n_bytes_written,
            "page_bytes": self.parts.memory.page_bytes,
            "requests_live": self.engine.n_live,
            "requests_by_stage": self.engine.n_by_stage(),
            "requests_by_state": dict(Counter(request.state for request in seen.requests)),
            "retracted": self.engine.n_retracted,
            "tokens_recomputed": self.engine.n_recomputed,
            "leaks": leaks,
            "pages_verified": audit.n_pages_verified,
            "pages_wrong": audit.n_pages_wrong,
            "pages_damaged": audit.n_pages_damaged,
            "kv_diff_max": audit.diff_max,
            "device": attrs.asdict(seen.device),
            "host": attrs.asdict(seen.host),
            "n_tickets": seen.n_tickets,
            "n_pins": seen.n_device_pins + seen.n_host_pins,
        }


def namespace_of(orders: ProcessOrders, model: str, dtype: str, request: Request) -> bytes:
    """Everything that decides what this rank's pages of a request hold and who may read them."""
    settings = orders.settings
    # Nothing is reused under a name that nobody else has, not even what is on its way.
    salt = request.salt if settings.decode_reuses else f"{request.salt}/{request.rid}"
    return Namespace(
        tenant=request.tenant,
        salt=salt,
        model=model,
        weights=orders.weights_name,
        dtype=dtype,
        layout="layer-part-token-head-dim",
        page_tokens=settings.page_tokens,
        shard=f"tp{orders.rank}of{settings.n_ranks}",
    ).digest()


def engine_of(
    orders: ProcessOrders, decoder: Decoder, driver: Driver, parts: RankPorts
) -> DecodeEngine:
    settings, model = orders.settings, decoder.config
    v_layers = parts.memory.v_layers
    assert v_layers is not None, "grouped attention keeps values"
    kv = PagedKv(settings.page_tokens, tuple(zip(parts.memory.k_layers, v_layers, strict=True)))
    return DecodeEngine(
        driver,
        decoder,
        kv,
        Audit(decoder, kv),
        lambda request: namespace_of(orders, model.name, model.dtype, request),
        orders.peers,
        samples=orders.rank == 0,
        reuses=settings.decode_reuses,
        output_reserved_percent=settings.output_reserved_percent,
        n_running_max=settings.n_running_max,
        chunk_tokens=settings.decode_chunk_tokens,
    )


def work(orders: ProcessOrders, stop: threading.Event) -> None:
    settings = orders.settings
    device: str = settings.device
    if device == "cuda" and torch.cuda.device_count() > 1:
        device = f"cuda:{orders.rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    config = driver_config(settings)
    channel, waker = Channel(orders.channel), Waker()
    decoder = ModelSource(settings.model, settings.seed).decoder(
        shard=Shard(rank=orders.rank, n_ranks=settings.n_ranks),
        device=device,
        all_reduce=model_all_reduce(orders),
    )
    parts = open_ports(orders, decoder.config, config, waker.wake)
    sender = receiver = None
    deadline_s = settings.ballot_deadline_s
    if orders.rank == 0:
        sender = BeatSender(orders.run_folder, orders.group, settings.n_ranks, deadline_s, stop)
    else:
        receiver = BeatReceiver(orders.run_folder, orders.group, orders.rank, deadline_s, stop)
    observers = observers_for(config, parts.ports)
    with Driver(config, parts.ports, observers.observer) as driver:
        engine = engine_of(orders, decoder, driver, parts)
        loop = RankLoop(
            orders,
            driver,
            engine,
            parts,
            observers.metrics,
            channel,
            waker,
            stop,
            sender,
            receiver,
        )
        channel.tell(Started(info={"role": "decode", "rank": orders.rank}))
        loop.run()
    for end in (sender, receiver, channel, waker):
        if end is not None:
            end.close()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(live(work, lambda orders: f"rank {orders.rank}"))
