"""What a tick costs the scheduler's thread: N requests in flight, idle and with an event for each,
and a long queue behind a device that is full.

The real driver over ports that only count: no copy, socket or reduction is timed here, since a tick
waits for none of them (the ballot has its own bench)."""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence

from attrs import define, field

from kvlift.cli.benches.row import Row, median_cpu_us, row
from kvlift.core.ballot import ballot_length
from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.keys import KEY_BYTES
from kvlift.core.landed import Landed, PagesArrived
from kvlift.core.prompt import Prompt
from kvlift.effects.clock import MonotonicClock
from kvlift.effects.lone_rank import LoneRank
from kvlift.runtime.config import Config
from kvlift.runtime.driver import Driver
from kvlift.runtime.interpret import Ports

PAGE_TOKENS = 64
N_PAGES = 32
SIZES = (0, 16, 256, 1024)
N_QUEUED = 10_000
TARGETS_US = {"idle-256": 200.0, "busy-256": 5000.0}


@define
class CountingPorts:
    """Peers and copies that take everything and deliver what the bench says."""

    reports: list[Landed] = field(factory=list)
    wanted: list[Ticket] = field(factory=list)

    def landed(self) -> list[Landed]:
        reports, self.reports = self.reports, []
        return reports

    def send_hold(
        self, ticket: Ticket, rid: Rid, attempt: Attempt, peer: str, prompt: Prompt
    ) -> None: ...

    def send_want(
        self, ticket: Ticket, start: int, device_pages: Sequence[int], promise: int
    ) -> None:
        self.wanted.append(ticket)

    def send_committed(self, ticket: Ticket) -> None: ...

    def send_aborted(self, ticket: Ticket) -> None: ...

    def close_peer(self, ticket: Ticket) -> None: ...

    def start_restore(
        self,
        ticket: Ticket,
        host_pages: Sequence[int],
        device_pages: Sequence[int],
        start: int = 0,
    ) -> None: ...

    def start_mirror(
        self, ticket: Ticket, device_pages: Sequence[int], host_pages: Sequence[int]
    ) -> None: ...

    def close(self, deadline_s: float) -> bool:
        return True


def measure(progress: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    for n_requests in SIZES:
        progress(f"{n_requests} requests in flight")
        rows += _rows(n_requests)
    progress(f"{N_QUEUED:,} requests in the queue")
    rows.append(_queued_row())
    return rows


def _driver(ports: CountingPorts, n_requests: int, device_pages: int, n_slots: int) -> Driver:
    """With so many requests of `N_PAGES` pages submitted."""
    config = Config(
        page_tokens=PAGE_TOKENS, device_pages=device_pages, host_pages=0, ballot_slots=n_slots
    )
    ranks = LoneRank(ballot_length(config.policy()))
    clock = MonotonicClock()
    driver = Driver(config, Ports(copies=ports, peers=ports, ranks=ranks, clock=clock))
    for number in range(n_requests):
        tokens = array("i", [number] * (PAGE_TOKENS * N_PAGES)).tobytes()
        driver.submit(f"r{number}", Prompt(bytes(KEY_BYTES), tokens, PAGE_TOKENS), peer="p")
    return driver


def _queued_row() -> Row:
    """Sixteen requests fill the device, all but their reserve; the others wait for them."""
    driver = _driver(CountingPorts(), N_QUEUED + 16, 17 * N_PAGES - 1, 256)
    for _ in range(4):
        driver.tick()
    queued_us = median_cpu_us(driver.tick, 20)
    states = Counter(request.state for request in driver.snapshot().requests)
    assert states == {"filling": 16, "queued": N_QUEUED}
    return row(f"queued-{N_QUEUED}", queued_us, "us")


def _rows(n_requests: int) -> list[Row]:
    ports = CountingPorts()
    device_pages = max(64, 2 * N_PAGES * n_requests)
    driver = _driver(ports, n_requests, device_pages, max(8, 2 * n_requests))
    while len(ports.wanted) < n_requests:
        driver.tick()
    driver.tick()
    idle_us = median_cpu_us(driver.tick, 100)
    n_arrived = 0

    def busy() -> None:
        nonlocal n_arrived
        n_arrived += 1
        ports.reports = [PagesArrived(ticket, n_arrived) for ticket in ports.wanted]
        driver.tick()

    busy_us = median_cpu_us(busy, N_PAGES - 4)
    states = [request.state for request in driver.snapshot().requests]
    assert states == ["filling"] * n_requests
    return [
        row(f"idle-{n_requests}", idle_us, "us", TARGETS_US.get(f"idle-{n_requests}")),
        row(f"busy-{n_requests}", busy_us, "us", TARGETS_US.get(f"busy-{n_requests}")),
    ]
