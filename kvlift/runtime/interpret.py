"""The interpreter of effects: one match, a line or two a case, no decisions.

Handles become physical pages of this rank, and the port is called."""

from typing import assert_never

from attrs import field, frozen

from kvlift.core.effect import (
    CancelPersist,
    CancelPrefetch,
    CancelRestore,
    ClosePeer,
    Effect,
    ForgetStorage,
    FreeDevice,
    FreeHost,
    SendAborted,
    SendCommitted,
    SendHold,
    SendWant,
    StartLookup,
    StartMirror,
    StartPersist,
    StartPrefetch,
    StartRestore,
    TakeDevice,
    TakeHost,
)
from kvlift.effects.pages import PageTable
from kvlift.effects.ports import Clock, Copies, PageRun, Peers, Ranks, Store
from kvlift.effects.wakeup import Wakeup


@frozen(kw_only=True)
class Ports:
    """What a driver needs of the world. `store` may be None: then there is no storage tier.

    `wakeup`: the one whose `ring` the ports were given as `on_landed`, for `Driver.wait`."""

    copies: Copies
    peers: Peers
    ranks: Ranks
    clock: Clock
    store: Store | None = None
    wakeup: Wakeup = field(factory=Wakeup)


def run_effect(effect: Effect, ports: Ports, device: PageTable, host: PageTable) -> None:
    match effect:
        case TakeDevice(pages=pages):
            device.take(pages)
        case FreeDevice(pages=pages):
            device.free(pages)
        case TakeHost(pages=host_pages):
            host.take(host_pages)
        case FreeHost(pages=host_pages):
            host.free(host_pages)
        case StartRestore(ticket=ticket, start=start):
            ports.copies.start_restore(
                ticket, host.resolve(effect.host), device.resolve(effect.device), start
            )
        case StartMirror(ticket=ticket):
            ports.copies.start_mirror(
                ticket, device.resolve(effect.device), host.resolve(effect.host)
            )
        case SendHold(ticket=ticket):
            ports.peers.send_hold(ticket, effect.rid, effect.attempt, effect.peer, effect.prompt)
        case SendWant(ticket=ticket):
            places = device.resolve(effect.device)
            ports.peers.send_want(ticket, effect.start, places, effect.promise)
        case SendCommitted(ticket=ticket):
            ports.peers.send_committed(ticket)
        case SendAborted(ticket=ticket):
            ports.peers.send_aborted(ticket)
        case ClosePeer(ticket=ticket):
            ports.peers.close_peer(ticket)
        case CancelRestore():
            pass  # the desk has dropped it if it had not begun; a running copy is left alone
        case (
            StartLookup()
            | StartPrefetch()
            | CancelPrefetch()
            | StartPersist()
            | CancelPersist()
            | ForgetStorage()
        ):
            if ports.store is not None:
                _run_store(effect, ports.store, device, host)
        case _:
            assert_never(effect)


def _run_store(
    effect: StartLookup
    | StartPrefetch
    | CancelPrefetch
    | StartPersist
    | CancelPersist
    | ForgetStorage,
    store: Store,
    device: PageTable,
    host: PageTable,
) -> None:
    match effect:
        case StartLookup(ticket=ticket, prompt=prompt):
            store.start_lookup(ticket, PageRun(prompt, tuple(range(effect.start, effect.stop))))
        case StartPrefetch(ticket=ticket, prompt=prompt, start=start):
            run = PageRun(prompt, tuple(range(start, start + len(effect.host))))
            store.start_prefetch(ticket, run, host.resolve(effect.host))
        case CancelPrefetch(ticket=ticket):
            store.cancel_prefetch(ticket)
        case CancelPersist(ticket=ticket):
            store.cancel_persist(ticket)
        case StartPersist(ticket=ticket, prompt=prompt, positions=positions):
            run = PageRun(prompt, positions)
            if effect.host:
                store.start_persist(ticket, run, host.resolve(effect.host))
            else:
                store.start_persist_device(ticket, run, device.resolve(effect.device))
        case ForgetStorage():
            store.forget_all()
        case _:
            assert_never(effect)
