"""One scheduler, many workers: the same core, with ballots that the host carries."""

from kvlift.core.keys import Namespace
from kvlift.core.phase import Outcome
from kvlift.core.policy import Switch
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.core.tier import Source, Tier
from kvlift.runtime.config import Config
from kvlift.runtime.hosted import Scheduler, Worker
from kvlift.runtime.interpret import Ports
from kvlift.runtime.observer import Observer
from kvlift.runtime.tick import Granted, Ready, Tick
from kvlift.testing.sim_memory import page_value
from kvlift.testing.sim_peers import PrefillNode
from kvlift.testing.sim_rank import SimRank, sim_ranks

PAGE = 4
NAMESPACE = Namespace(page_tokens=PAGE).digest()


class Host:
    """Carries orders to the workers and their ballots back, a step at a time."""

    def __init__(self, n_workers: int, observer: Observer | None = None) -> None:
        self.config = Config.parse(
            {
                "page_tokens": PAGE,
                "device_pages": 16,
                "host_pages": 16,
                "prefetch_min_pages": 1,
                "decode_reserve_pages": 0,
                "cost_model": "off",
            }
        )
        node = PrefillNode("p", n_ranks=n_workers)
        self.ranks: list[SimRank] = sim_ranks(n_workers, 16, 16, None, node)
        self.workers = [
            Worker(
                self.config,
                Ports(
                    copies=rank.copies,
                    peers=rank.peers,
                    ranks=rank.ranks,
                    clock=rank.clock,
                    store=rank.store,
                ),
            )
            for rank in self.ranks
        ]
        self.scheduler = Scheduler(self.config, storage=Switch.ON, observer=observer)
        self.ballots: list[tuple[int, ...]] = []

    def step(self) -> Tick:
        tick, orders = self.scheduler.tick(self.ballots)
        ballots = [worker.obey(orders) for worker in self.workers]
        self.ballots = ballots if orders.is_awaited else []
        return tick

    def until_ready(self, rid: str, n_steps_max: int = 20) -> Ready:
        for _ in range(n_steps_max):
            for ready in self.step().ready:
                if ready.rid == rid:
                    return ready
        raise AssertionError(f"{rid} is not ready after {n_steps_max} steps")


def prompt(n_pages: int, first: int = 0) -> Prompt:
    return Prompt(NAMESPACE, token_bytes(range(first, first + n_pages * PAGE)), PAGE)


def test_a_request_lives_from_the_peer_to_storage_and_back_without_a_collective() -> None:
    host = Host(n_workers=3)
    host.scheduler.submit("a", prompt(4), peer="p")
    ready = host.until_ready("a")
    assert ready.n_pages_by_source[Source.PEER] == 4
    for rank in host.ranks:
        held = [rank.memory.device[page] for page in ready.device_pages]
        assert held == [page_value(prompt(4), position) for position in range(4)]
    host.scheduler.run("a")
    host.step()
    grown = host.scheduler.grow("a", 1)
    assert isinstance(grown, Granted)
    host.scheduler.finish("a", token_bytes([16]))
    assert any(ended.outcome is Outcome.DONE for ended in host.step().ended)
    for _ in range(8):
        host.step()
    host.scheduler.flush([Tier.DEVICE, Tier.HOST])
    host.step()
    host.scheduler.submit("b", prompt(6), peer="p")
    again = host.until_ready("b")
    assert again.n_pages_by_source[Source.STORAGE] == 4
    assert again.n_pages_by_source[Source.PEER] == 2
    assert all(not sent for rank in host.ranks for sent in rank.ranks.mailbox.ballots)


def test_the_scheduler_and_its_workers_know_the_same_physical_pages() -> None:
    host = Host(n_workers=2)
    for number in range(3):
        rid = f"r{number}"
        host.scheduler.submit(rid, prompt(4, first=100 * number), peer="p")
        ready = host.until_ready(rid)
        for rank in host.ranks:
            held = [rank.memory.device[page] for page in ready.device_pages]
            assert held == [page_value(prompt(4, first=100 * number), n) for n in range(4)]
        host.scheduler.run(rid)
        host.step()
        host.scheduler.finish(rid, token_bytes([1]))
        host.step()


def test_the_poorest_worker_decides_how_much_fits() -> None:
    host = Host(n_workers=2)
    host.workers[1].set_aside(Tier.DEVICE, 13)
    host.scheduler.submit("a", prompt(4), peer="p")
    for _ in range(8):
        assert not host.step().ready
    host.workers[1].set_aside(Tier.DEVICE, 0)
    host.until_ready("a")
