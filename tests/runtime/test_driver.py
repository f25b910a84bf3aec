"""The driver as a host sees it: calls, refusals, growth, ballots, and its end."""

from collections.abc import Callable

import pytest
from attrs import evolve

from kvlift.core.ballot import RankFailed, RanksDiverged
from kvlift.core.phase import Outcome
from kvlift.core.policy import Switch
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.core.tier import Source, Tier
from kvlift.runtime.config import Config, ConfigError
from kvlift.runtime.driver import Driver
from kvlift.runtime.errors import (
    DriverClosed,
    DuplicateRequest,
    PromptTooLong,
    RequestError,
    TooManyRequests,
    UnknownRequest,
)
from kvlift.runtime.interpret import Ports
from kvlift.runtime.tick import Granted, NoRoom, Pending, Ready, Tick
from kvlift.testing.sim_memory import Mode, SimMemory
from kvlift.testing.sim_peers import PrefillNode, SimPeers
from kvlift.testing.sim_rank import SimRank, sim_ranks

PAGE = 4
CONFIG = Config(page_tokens=PAGE, device_pages=8, host_pages=8, decode_reserve_pages=0)


class Worker:
    """Drivers of all ranks, called and ticked together."""

    def __init__(self, config: Config = CONFIG, n_ranks: int = 2) -> None:
        self.node = PrefillNode("prefill", n_ranks)
        self.sims: list[SimRank] = sim_ranks(
            n_ranks, config.device_pages, config.host_pages, None, self.node
        )
        self.drivers = [
            Driver(
                config,
                Ports(copies=s.copies, store=s.store, peers=s.peers, ranks=s.ranks, clock=s.clock),
            )
            for s in self.sims
        ]

    def all(self, call: Callable[[Driver], object]) -> list[object]:
        return [call(driver) for driver in self.drivers]

    def submit(self, rid: str, n_tokens: int, first: int = 0, **options: int) -> None:
        prompt = Prompt(bytes(32), token_bytes(range(first, first + n_tokens)), PAGE)
        self.all(lambda d: d.submit(rid, prompt, peer="prefill", **options))

    def tick(self, n_ticks: int = 1) -> list[Tick]:
        ticks = [[driver.tick() for driver in self.drivers] for _ in range(n_ticks)]
        return [each[0] for each in ticks]

    def ready(self, rid: str) -> Ready:
        for tick in self.tick(12):
            for one in tick.ready:
                if one.rid == rid:
                    return one
        raise AssertionError(f"{rid} is not ready")

    def running(self, rid: str, n_tokens: int, first: int = 0) -> Ready:
        self.submit(rid, n_tokens, first)
        one = self.ready(rid)
        self.all(lambda d: d.run(rid))
        self.tick()
        return one


def test_a_request_becomes_ready_with_its_pages_and_its_first_token() -> None:
    worker = Worker()
    worker.submit("A", 10)
    one = worker.ready("A")
    assert len(one.device_pages) == len(set(one.device_pages)) == 3
    assert one.token is not None
    assert one.logprob is not None
    assert one.needs_prefill_from is None
    assert one.n_pages_by_source[Source.PEER] == 3


def test_from_submission_to_promise_is_at_most_two_ticks_and_from_landing_to_ready_two() -> None:
    worker = Worker()
    worker.node.mode = Mode.HELD
    worker.submit("A", 8)
    names = []
    for _ in range(4):
        worker.sims[0].clear_effects()
        worker.tick()
        names.append(worker.sims[0].effects())
    assert "SendHold" in names[0]
    assert "StartLookup" in names[0]
    assert "SendWant" in [*names[1], *names[2]]
    for sim in worker.sims:
        for node, talk in sim.peers.open_talks():
            assert node is not None
            sim.peers.send_rest(node, talk, None)
    assert any(tick.ready for tick in worker.tick(3))


def test_a_refused_call_leaves_no_trace() -> None:
    worker = Worker()
    worker.submit("A", 8)
    for driver in worker.drivers:
        prompt = Prompt(bytes(32), token_bytes(range(8)), PAGE)
        with pytest.raises(DuplicateRequest, match="abort it, or choose another id"):
            driver.submit("A", prompt, peer="prefill")
        with pytest.raises(PromptTooLong, match="needs 9 pages with its output, the device has 8"):
            driver.submit("B", prompt, peer="prefill", n_pages_output=7)
        with pytest.raises(ValueError, match="empty prompt"):
            driver.submit("B", Prompt(bytes(32), b"", PAGE), peer="prefill")
        with pytest.raises(ValueError, match="have 2 tokens"):
            driver.submit("B", Prompt(bytes(32), prompt.tokens, 2), peer="prefill")
        with pytest.raises(UnknownRequest, match="abort: there is no live request 'B'"):
            driver.abort("B")
        for call in (driver.run, driver.resume):
            with pytest.raises(UnknownRequest):
                call("B")
        with pytest.raises(UnknownRequest):
            driver.finish("B", b"")
        with pytest.raises(UnknownRequest):
            driver.grow("A", 1)
        with pytest.raises(ValueError, match="at least one page"):
            driver.grow("A", 0)
    worker.ready("A")
    assert [r.rid for r in worker.drivers[0].snapshot().requests] == ["A"]


def test_a_call_that_comes_too_late_is_told_and_changes_nothing() -> None:
    worker = Worker()
    worker.submit("A", 8)
    worker.ready("A")
    worker.all(lambda d: d.abort("A"))
    worker.all(lambda d: d.run("A"))
    (tick,) = worker.tick()
    assert [one.outcome for one in tick.ended] == [Outcome.ABORTED]
    assert [(one.rid, one.call) for one in tick.refused] == [("A", "Started")]
    with pytest.raises(UnknownRequest):
        worker.drivers[0].abort("A")


def test_no_more_requests_than_the_config_allows() -> None:
    worker = Worker(evolve(CONFIG, requests_max=1), n_ranks=1)
    worker.submit("A", 4)
    with pytest.raises(TooManyRequests, match="raise requests_max"):
        worker.submit("B", 4)


def test_growth_is_answered_in_the_same_call_and_alike_on_all_ranks() -> None:
    worker = Worker()
    one = worker.running("A", 8)
    answers = worker.all(lambda d: d.grow("A", 2))
    for answer in answers:
        assert isinstance(answer, Granted)
        assert len(answer.device_pages) == 2
        assert not set(answer.device_pages) & set(one.device_pages)
    assert worker.all(lambda d: d.grow("A", 5)) == [NoRoom(), NoRoom()]
    worker.tick(3)
    digests = {driver.snapshot().digest for driver in worker.drivers}
    assert len(digests) == 1


def test_growth_after_the_end_was_called_is_refused() -> None:
    worker = Worker()
    worker.running("A", 8)
    worker.all(lambda d: d.finish("A", token_bytes([1])))
    for driver in worker.drivers:
        with pytest.raises(RequestError):
            driver.grow("A", 1)


def test_growth_that_waits_for_pages_on_their_way_down_is_told_within_three_ticks() -> None:
    config = Config.parse(
        {
            "page_tokens": PAGE,
            "device_pages": 4,
            "host_pages": 4,
            "decode_reserve_pages": 0,
            "write": "back",
            "persist": "off",
        }
    )
    worker = Worker(config)
    worker.running("A", 8)
    worker.all(lambda d: d.finish("A", token_bytes([1])))
    worker.tick(3)
    worker.running("B", 8, first=100)
    assert worker.all(lambda d: d.grow("B", 2)) == [Pending(), Pending()]
    grown = [one for tick in worker.tick(3) for one in tick.grown]
    assert [(one.rid, len(one.device_pages)) for one in grown] == [("B", 2)]


@pytest.mark.parametrize("n_ticks", [6, 7, 8, 9])
def test_a_growth_between_vote_and_verdict_shifts_no_slot(n_ticks: int) -> None:
    """With write-back it opens tickets; the ballot that is out speaks of the older ones."""
    config = Config.parse(
        {
            "page_tokens": PAGE,
            "device_pages": 24,
            "host_pages": 8,
            "decode_reserve_pages": 0,
            "ballot_slots": 8,
            "write": "back",
            "persist": "off",
        }
    )
    worker = Worker(config)
    worker.running("D", 8)
    worker.all(lambda d: d.finish("D", token_bytes([1])))
    worker.running("A", 4, first=1000)
    worker.node.mode = Mode.HELD
    for number in range(10):
        worker.submit(f"R{number}", 8, first=100 * (number + 1))
    worker.tick(12)
    for sim in worker.sims:
        for node, talk in sim.peers.open_talks():
            assert node is not None
            sim.peers.send_rest(node, talk, 1)
    worker.tick(n_ticks)
    before = dict(worker.drivers[0].state.agreed.tickets)
    assert len(before) > config.ballot_slots
    assert worker.all(lambda d: d.grow("A", 3)) == [Pending(), Pending()]
    assert len(worker.drivers[0].state.agreed.tickets) > len(before), "no ticket was opened"
    worker.tick()
    after = worker.drivers[0].state.agreed.tickets
    assert {ticket: after.get(ticket) for ticket in before} == before
    worker.node.mode = Mode.AUTO
    worker.tick(10)
    assert worker.drivers[0].snapshot().request("R0") is not None


def test_an_idle_worker_sends_no_ballot() -> None:
    worker = Worker()
    worker.running("A", 8)
    worker.all(lambda d: d.finish("A", token_bytes([1])))
    worker.tick(8)
    n_sent = [sim.ranks.n_sent for sim in worker.sims]
    assert not worker.tick()[0].is_busy
    assert [sim.ranks.n_sent for sim in worker.sims] == n_sent
    assert worker.drivers[0].snapshot().is_idle()


def test_an_error_of_a_port_fails_all_ranks_in_the_next_ballot() -> None:
    worker = Worker()

    worker.submit("A", 8)
    worker.sims[1].peers.memory = SimMemory(0, 0)  # the first page that is wanted has no place
    with pytest.raises(RankFailed, match="a rank reported a failure"):
        worker.tick(6)


def test_a_rank_that_fails_itself_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_of_a_want: object) -> None:
        raise MemoryError

    monkeypatch.setattr(SimPeers, "send_want", no_memory)
    worker = Worker()
    worker.submit("A", 8)
    with pytest.raises(RankFailed) as failed:
        worker.tick(6)
    assert isinstance(failed.value.__cause__, MemoryError)


def test_ranks_that_are_told_different_things_diverge_by_name() -> None:
    worker = Worker()
    prompt = Prompt(bytes(32), token_bytes(range(8)), PAGE)
    worker.drivers[0].submit("A", prompt, peer="prefill")
    worker.drivers[1].submit("B", prompt, peer="prefill")
    worker.tick()
    with pytest.raises(RanksDiverged) as error:
        worker.drivers[0].tick()
    assert error.value.field == "requests"


def test_sizes_do_not_change_while_a_driver_runs() -> None:
    worker = Worker(n_ranks=1)
    with pytest.raises(ConfigError, match="device_pages can't change"):
        worker.drivers[0].reconfigure(evolve(CONFIG, device_pages=9))
    worker.drivers[0].reconfigure(evolve(CONFIG, persist=Switch.OFF))
    assert worker.drivers[0].config.persist is Switch.OFF


def test_a_closed_driver_does_not_tick_and_closes_once() -> None:
    worker = Worker(n_ranks=1)
    with worker.drivers[0] as driver:
        driver.tick()
    with pytest.raises(DriverClosed):
        driver.tick()
    assert driver.close()


def test_pages_that_are_adopted_are_hits() -> None:
    worker = Worker()
    prompt = Prompt(bytes(32), token_bytes(range(12)), PAGE)
    for driver in worker.drivers:
        assert sorted(driver.adopt(Tier.HOST, prompt, 0, 2)) == [0, 1]
        assert driver.adopt(Tier.HOST, prompt, 0, 2) == {}
        with pytest.raises(LookupError, match="no room"):
            driver.adopt(Tier.DEVICE, Prompt(bytes(32), bytes(4 * PAGE * 20), PAGE), 0, 20)
        assert driver.hit(prompt).host == 2
