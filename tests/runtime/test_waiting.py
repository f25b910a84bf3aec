"""A host with nothing to compute sleeps, and wakes in time."""

import threading
import time

from attrs import evolve

from kvlift.effects.wakeup import Wakeup
from kvlift.runtime.config import Config
from kvlift.runtime.driver import BALLOT_WAIT_S, Driver
from kvlift.runtime.hosted import Worker
from kvlift.runtime.interpret import Ports
from kvlift.testing.sim_memory import Mode
from kvlift.testing.sim_peers import PrefillNode
from kvlift.testing.sim_rank import sim_ranks
from tests.runtime.test_hosted import Host, prompt

LONG_S = 20.0
SOON_S = 5.0
"""Far below `LONG_S`, and enough for a machine that is busy."""


def seconds_of(wait: object, timeout_s: float) -> tuple[bool, float]:
    began_s = time.monotonic()
    is_woken = wait(timeout_s)  # type: ignore[operator]
    return is_woken, time.monotonic() - began_s


def driver() -> Driver:
    config = Config(page_tokens=4, device_pages=16, host_pages=16)
    [rank] = sim_ranks(1, 16, 16, None, PrefillNode("p", 1))
    ports = Ports(
        copies=rank.copies,
        store=rank.store,
        peers=rank.peers,
        ranks=rank.ranks,
        clock=rank.clock,
        wakeup=Wakeup(),
    )
    return Driver(config, ports)


def test_a_submission_from_another_thread_wakes_the_scheduler() -> None:
    one = driver()
    one.tick()
    timer = threading.Timer(0.05, one.submit, ("a", prompt(2)), {"peer": "p"})
    timer.start()
    is_woken, waited_s = seconds_of(one.wait, LONG_S)
    timer.join()
    assert is_woken
    assert waited_s < SOON_S


def test_while_a_ballot_is_out_the_sleep_is_short() -> None:
    one = driver()
    one.submit("a", prompt(2), peer="p")
    assert one.tick().is_busy
    assert one.wait(0.0), "the submission rang"
    _is_woken, waited_s = seconds_of(one.wait, LONG_S)
    assert BALLOT_WAIT_S / 2 < waited_s < SOON_S


def test_a_worker_wakes_at_its_next_deadline() -> None:
    """Nothing lands on it, and what is overdue has to be said."""
    host = Host(n_workers=1)
    host.ranks[0].peers.nodes["p"].mode = Mode.HELD
    rank = host.ranks[0]
    ports = Ports(
        copies=rank.copies, peers=rank.peers, ranks=rank.ranks, clock=rank.clock, store=rank.store
    )
    host.workers = [Worker(evolve(host.config, transfer_deadline_ms=50), ports)]
    host.scheduler.submit("a", prompt(4), peer="p")
    for _ in range(6):
        host.step()
    is_woken, waited_s = seconds_of(host.workers[0].wait, LONG_S)
    assert not is_woken
    assert 0.02 < waited_s < SOON_S
