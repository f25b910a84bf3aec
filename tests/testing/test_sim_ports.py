"""The simulated ports: values move when things land, and not before."""

import threading

import pytest

from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.landed import (
    LookupAnswered,
    MirrorEnded,
    PagesArrived,
    PeerCause,
    PeerFailed,
    PeerLetGo,
    PersistEnded,
    PrefetchEnded,
    RestoreEnded,
    TokenArrived,
)
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.core.tier import Tier
from kvlift.effects.ports import PageRun, RankLate
from kvlift.testing.clock import ManualClock
from kvlift.testing.sim_copies import SimCopies
from kvlift.testing.sim_memory import Mode, SimMemory, page_value
from kvlift.testing.sim_peers import PrefillNode, SimPeers, token_after
from kvlift.testing.sim_ranks import in_process_ranks
from kvlift.testing.sim_store import Damage, SimStore

PROMPT = Prompt(bytes(32), token_bytes(range(18)), 4)
VALUES = [page_value(PROMPT, position) for position in range(5)]
RID, ATTEMPT = Rid("A"), Attempt(1)


@pytest.fixture
def memory() -> SimMemory:
    return SimMemory(8, 8)


def node_and_peers(memory: SimMemory, mode: Mode) -> tuple[PrefillNode, SimPeers]:
    node = PrefillNode("p", mode=mode)
    return node, SimPeers({"p": node}, 0, memory)


def test_a_page_value_is_the_tokens_up_to_it_in_its_namespace() -> None:
    other = Prompt(bytes([1] * 32), PROMPT.tokens, 4)
    assert len({*VALUES, *(page_value(other, position) for position in range(5))}) == 10
    assert VALUES[4].tokens == PROMPT.tokens
    with pytest.raises(IndexError, match="behind the end"):
        page_value(PROMPT, 5)


def test_a_held_copy_moves_nothing_and_is_in_flight_until_it_lands(memory: SimMemory) -> None:
    copies = SimCopies(memory, restores=Mode.HELD)
    memory.host[3] = VALUES[0]
    memory.device[5] = VALUES[1]
    copies.start_restore(Ticket(1), [3], [5])
    assert copies.landed() == []
    assert memory.device[5:6] == [None]
    assert {(one.tier, one.kind) for one in copies.accesses()} == {
        (Tier.HOST, "reads"),
        (Tier.DEVICE, "writes"),
    }
    assert not copies.close(0)
    copies.land(copies.log[0])
    assert copies.landed() == [RestoreEnded(Ticket(1), 1)]
    assert memory.device[5] == VALUES[0]
    assert list(copies.accesses()) == []


def test_a_copy_whose_source_changes_under_it_is_torn(memory: SimMemory) -> None:
    copies = SimCopies(memory)
    memory.device[0] = VALUES[0]
    copies.start_mirror(Ticket(1), [0], [2])
    memory.device[0] = VALUES[1]
    assert copies.landed() == [MirrorEnded(Ticket(1), 1)]
    assert memory.host[2] is None


def test_a_failed_copy_leaves_poison_and_ends_once(memory: SimMemory) -> None:
    copies = SimCopies(memory, restores=Mode.HELD)
    memory.host[0] = VALUES[0]
    copies.start_restore(Ticket(1), [0], [0])
    copies.fail(copies.log[0])
    assert copies.landed() == [RestoreEnded(Ticket(1), 0)]
    assert memory.device[0] is None
    with pytest.raises(ValueError, match="has ended before"):
        copies.land(copies.log[0])


def test_a_lookup_counts_to_the_first_hole_even_when_reads_are_held(memory: SimMemory) -> None:
    store = SimStore(memory, reads=Mode.HELD)
    for value in (VALUES[0], VALUES[1], VALUES[3]):
        store.put(value)
    store.start_lookup(Ticket(1), PageRun(PROMPT, (0, 1, 2, 3)))
    assert store.landed() == [LookupAnswered(Ticket(1), 2)]


def test_a_read_brings_the_pages_before_the_damage_and_drops_the_damaged_one(
    memory: SimMemory,
) -> None:
    store = SimStore(memory)
    for value in VALUES[:4]:
        store.put(value)
    assert store.damage(VALUES[2], Damage.CORRUPT)
    assert not store.damage(VALUES[4], Damage.CORRUPT)
    store.start_prefetch(Ticket(1), PageRun(PROMPT, (0, 1, 2, 3)), [4, 5, 6, 7])
    assert store.landed() == [PrefetchEnded(Ticket(1), 2)]
    assert memory.host[4:] == [VALUES[0], VALUES[1], None, None]
    assert not store.has(VALUES[2])
    assert store.has(VALUES[3])


def test_a_held_read_lands_with_as_many_pages_as_it_is_told(memory: SimMemory) -> None:
    store = SimStore(memory, reads=Mode.HELD)
    for value in VALUES[:3]:
        store.put(value)
    store.start_prefetch(Ticket(1), PageRun(PROMPT, (0, 1, 2)), [0, 1, 2])
    store.cancel_prefetch(Ticket(1))
    assert store.landed() == []
    store.land(store.log[0], 1)
    assert store.landed() == [PrefetchEnded(Ticket(1), 1)]
    assert memory.host[:2] == [VALUES[0], None]


def test_a_silent_store_answers_nothing(memory: SimMemory) -> None:
    store = SimStore(memory, is_silent=True)
    store.start_lookup(Ticket(1), PageRun(PROMPT, (0,)))
    assert store.landed() == []
    assert not store.close(0)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
def test_what_is_written_is_what_lies_in_the_pages(memory: SimMemory, tier: Tier) -> None:
    store = SimStore(memory)
    pool = memory.host if tier is Tier.HOST else memory.device
    pool[0], pool[1] = VALUES[0], VALUES[3]
    start = store.start_persist if tier is Tier.HOST else store.start_persist_device
    start(Ticket(1), PageRun(PROMPT, (0, 1)), [0, 1])
    assert [(one.tier, one.kind, one.pages) for one in store.accesses()] == [
        (tier, "reads", (0, 1))
    ]
    assert store.landed() == [PersistEnded(Ticket(1), 2)]
    assert store.has(VALUES[0])
    assert not store.has(VALUES[1]), "the second page held other tokens"
    store.forget_all()
    assert not store.has(VALUES[0])


def test_a_full_store_evicts_what_was_used_longest_ago(memory: SimMemory) -> None:
    store = SimStore(memory, n_pages_max=2)
    store.put(VALUES[0])
    store.put(VALUES[1])
    store.start_prefetch(Ticket(1), PageRun(PROMPT, (0,)), [0])
    store.landed()
    store.put(VALUES[2])
    assert [store.has(value) for value in VALUES[:3]] == [True, False, True]
    memory.host[:3] = VALUES[:3]
    store.start_persist(Ticket(2), PageRun(PROMPT, (0, 1, 2)), [0, 1, 2])
    assert store.landed() == [PersistEnded(Ticket(2), 2)]


def test_an_automatic_node_sends_pages_and_token_when_it_is_asked(memory: SimMemory) -> None:
    _node, peers = node_and_peers(memory, Mode.AUTO)
    peers.send_hold(Ticket(1), RID, ATTEMPT, "p", PROMPT)
    assert peers.landed() == []
    peers.send_want(Ticket(1), 3, [6, 7], promise=3)
    said = peers.landed()
    assert said[0] == PagesArrived(Ticket(1), 2)
    assert isinstance(said[1], TokenArrived)
    assert (said[1].token, said[1].logprob) == token_after(RID, PROMPT)
    assert memory.device[6:] == VALUES[3:5]
    peers.send_want(Ticket(1), 2, [5], promise=2)
    assert peers.landed() == [PagesArrived(Ticket(1), 3)]
    peers.send_committed(Ticket(1))
    assert peers.close(0)


def test_a_held_node_sends_the_token_with_the_last_wanted_page(memory: SimMemory) -> None:
    node, peers = node_and_peers(memory, Mode.HELD)
    peers.send_hold(Ticket(1), RID, ATTEMPT, "p", PROMPT)
    peers.send_want(Ticket(1), 0, [0, 1], promise=0)
    talk = peers.log[0]
    assert peers.landed() == []
    assert peers.send_rest(node, talk, 1) == 1
    assert peers.landed() == [PagesArrived(Ticket(1), 1)]
    assert memory.device[:2] == [VALUES[0], None]
    assert [access.pages for access in peers.accesses()] == [(1,)]
    assert peers.send_rest(node, talk, None) == 1
    assert [type(report) for report in peers.landed()] == [PagesArrived, TokenArrived]
    assert peers.repeat(talk)
    assert [type(report) for report in peers.landed()] == [PagesArrived, TokenArrived]


def test_a_held_node_sends_the_token_by_itself_where_no_page_is_wanted(memory: SimMemory) -> None:
    _node, peers = node_and_peers(memory, Mode.HELD)
    peers.send_hold(Ticket(1), RID, ATTEMPT, "p", PROMPT)
    peers.send_want(Ticket(1), 5, [], promise=5)
    assert [type(report) for report in peers.landed()] == [TokenArrived]


def test_an_abort_is_confirmed_by_an_automatic_node_and_not_by_a_silent_one(
    memory: SimMemory,
) -> None:
    node, peers = node_and_peers(memory, Mode.AUTO)
    node.is_silent = True
    peers.send_hold(Ticket(1), RID, ATTEMPT, "p", PROMPT)
    peers.send_want(Ticket(1), 0, [0], promise=0)
    peers.send_aborted(Ticket(1))
    assert peers.landed() == []
    assert not peers.close(0)
    node.is_silent = False
    assert peers.landed() == [PeerLetGo(Ticket(1))]
    assert peers.close(0)


def test_between_an_abort_and_its_confirmation_pages_may_still_come(memory: SimMemory) -> None:
    node, peers = node_and_peers(memory, Mode.HELD)
    peers.send_hold(Ticket(1), RID, ATTEMPT, "p", PROMPT)
    peers.send_want(Ticket(1), 0, [0, 1], promise=0)
    talk = peers.log[0]
    peers.acknowledge(talk)
    assert peers.landed() == [], "there was nothing to confirm"
    peers.send_aborted(Ticket(1))
    peers.send_rest(node, talk, 1)
    assert peers.landed() == [PagesArrived(Ticket(1), 1)]
    peers.acknowledge(talk)
    assert peers.landed() == [PeerLetGo(Ticket(1))]
    assert node.n_sendable(talk) == 0


def test_a_dead_node_fails_what_is_open_and_what_comes_later(memory: SimMemory) -> None:
    node, peers = node_and_peers(memory, Mode.HELD)
    peers.send_hold(Ticket(1), RID, ATTEMPT, "p", PROMPT)
    node.is_alive = False
    peers.lose_node(node)
    peers.send_hold(Ticket(2), Rid("B"), ATTEMPT, "p", PROMPT)
    peers.send_hold(Ticket(3), Rid("C"), ATTEMPT, "nowhere", PROMPT)
    said = peers.landed()
    failed = [one for one in said if isinstance(one, PeerFailed)]
    assert [(one.ticket, one.cause) for one in failed] == [
        (Ticket(n), PeerCause.LOST) for n in (1, 2, 3)
    ]
    assert "nowhere" in failed[2].reason
    assert [one for one in said if isinstance(one, PeerLetGo)] == [
        PeerLetGo(Ticket(n)) for n in (1, 2, 3)
    ]


def test_a_refusal_names_the_node_and_the_reason(memory: SimMemory) -> None:
    node, peers = node_and_peers(memory, Mode.HELD)
    node.refuse("A", "no such model", [])
    peers.send_hold(Ticket(1), RID, ATTEMPT, "p", PROMPT)
    failed, let_go = peers.landed()
    assert isinstance(failed, PeerFailed)
    assert failed.cause is PeerCause.REFUSED
    assert "p refused" in failed.reason
    assert "no such model" in failed.reason
    assert let_go == PeerLetGo(Ticket(1))
    peers.send_hold(Ticket(2), RID, Attempt(2), "p", PROMPT)
    assert peers.landed() == [], "one refusal is for one attempt"


def test_an_ended_lease_is_noticed_by_the_next_want(memory: SimMemory) -> None:
    node, peers = node_and_peers(memory, Mode.AUTO)
    peers.send_hold(Ticket(1), RID, ATTEMPT, "p", PROMPT)
    peers.send_want(Ticket(1), 4, [4], promise=4)
    peers.landed()
    node.expire("A", [peers.log[0]])
    assert peers.landed() == []
    peers.send_want(Ticket(1), 3, [3], promise=3)
    failed = peers.landed()[0]
    assert isinstance(failed, PeerFailed)
    assert failed.cause is PeerCause.GONE


def test_a_node_waits_for_the_wants_of_all_ranks_and_refuses_unequal_ones() -> None:
    node = PrefillNode("p", n_ranks=2)
    memories = [SimMemory(8, 0), SimMemory(8, 0)]
    first, second = (SimPeers({"p": node}, rank, memories[rank]) for rank in range(2))
    for peers in (first, second):
        peers.send_hold(Ticket(1), RID, ATTEMPT, "p", PROMPT)
    first.send_want(Ticket(1), 0, [0, 1], promise=0)
    assert first.landed() == []
    second.send_want(Ticket(1), 0, [5, 4], promise=0)
    assert [type(one) for one in first.landed()] == [PagesArrived, TokenArrived]
    assert [type(one) for one in second.landed()] == [PagesArrived, TokenArrived]
    assert memories[1].device[5] == VALUES[0]
    first.send_want(Ticket(1), 2, [2], promise=0)
    second.send_want(Ticket(1), 3, [3], promise=0)
    failed = second.landed()[0]
    assert isinstance(failed, PeerFailed)
    assert failed.cause is PeerCause.MISMATCH


def test_a_verdict_is_the_minimum_and_is_there_when_all_ranks_have_sent() -> None:
    first, second = in_process_ranks(2)
    first.send([3, -3, 9])
    with pytest.raises(RankLate, match="rank 1 is late"):
        first.verdict()
    second.send([2, -2, 10])
    assert first.verdict() == second.verdict() == (2, -3, 9)
    first.send([0, 0, 0])
    with pytest.raises(RankLate) as late:
        first.verdict()
    assert late.value.ranks == (1,)
    assert (first.n_sent, second.n_sent) == (2, 1)


def test_ballots_of_unequal_length_are_refused() -> None:
    first, second = in_process_ranks(2)
    first.send([1, 2])
    with pytest.raises(ValueError, match="the same config"):
        second.send([1])


def test_ranks_on_threads_of_their_own_wait_for_each_other() -> None:
    first, second = in_process_ranks(2, deadline_s=10)
    found: list[tuple[int, ...]] = []
    reports: list[list[bytes]] = []

    def early() -> None:
        first.send([5])
        found.append(first.verdict())
        reports.append(first.exchange(b"a"))

    thread = threading.Thread(target=early)
    thread.start()
    second.send([4])
    assert second.verdict() == (4,)
    assert second.exchange(b"b") == [b"a", b"b"]
    thread.join(10)
    assert found == [(4,)]
    assert reports == [[b"a", b"b"]]


def test_a_clock_moves_when_it_is_told_to_and_never_back() -> None:
    clock = ManualClock()
    clock.advance(250)
    assert clock.now_ns() == 250
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)
