"""The claims that are checked after every tick: each one is seen to bite."""

import pytest
from attrs import evolve

from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.testing.sim_memory import Mode, page_value
from kvlift.testing.sim_peers import PrefillNode
from kvlift.testing.sim_rank import SimRank, sim_ranks
from kvlift.testing.story_host import HostRequest
from kvlift.testing.story_lines import PromptLine
from kvlift.testing.story_prompts import Prompts
from kvlift.testing.watch import RankFacts, TierFacts, Watch

PROMPT = Prompt(bytes(32), token_bytes(range(16)), 4)
EMPTY = TierFacts(
    capacity=8,
    counts={"free": 8, "cached": 0, "owned": 0, "reserved": 0, "draining": 0},
    free_pages=frozenset(range(8)),
    used_pages={},
)
IDLE = RankFacts(device=EMPTY, host=EMPTY, open_tickets=frozenset())


@pytest.fixture
def rank() -> SimRank:
    return sim_ranks(1, 8, 8, None, PrefillNode("p", mode=Mode.HELD))[0]


def used(pages: dict[int, int]) -> TierFacts:
    """A tier whose handles have these physical pages."""
    return TierFacts(
        capacity=8,
        counts={"free": 8 - len(pages), "owned": len(pages)},
        free_pages=frozenset(range(8)) - frozenset(pages.values()),
        used_pages=pages,
    )


def broken(rank: SimRank, facts: RankFacts, request: HostRequest | None = None) -> str:
    return "; ".join(Watch().broken([rank], [facts], [request] if request else []))


def running() -> HostRequest:
    prompts = Prompts(4)
    nobody: list[int | None] = [None]
    return HostRequest(prompts.add(PromptLine(name="A", n_pages=2)), [()], nobody)


def test_an_idle_world_breaks_nothing(rank: SimRank) -> None:
    assert broken(rank, IDLE) == ""


def test_pages_that_are_not_counted_show(rank: SimRank) -> None:
    lost = evolve(EMPTY, counts={"free": 7})
    assert "device pages are not conserved" in broken(rank, evolve(IDLE, device=lost))
    odd = evolve(EMPTY, counts={"free": 9, "cached": -1})
    assert "negative" in broken(rank, evolve(IDLE, host=odd))


def test_a_physical_page_of_two_handles_shows(rank: SimRank) -> None:
    twice = evolve(used({1: 3, 2: 4}), used_pages={1: 3, 2: 3})
    assert "device page 3 is page 1 and page 2" in broken(rank, evolve(IDLE, device=twice))
    free = evolve(used({1: 3}), free_pages=frozenset({3}))
    assert "host page 3 is free and in use" in broken(rank, evolve(IDLE, host=free))


def test_a_page_that_is_free_under_a_copy_shows(rank: SimRank) -> None:
    rank.copies.restores = Mode.HELD
    rank.copies.start_restore(Ticket(1), [2], [5])
    said = broken(rank, IDLE)
    assert "host page 2 is free while ticket 1 reads it" in said
    assert "device page 5 is free while ticket 1 writes it" in said
    assert broken(rank, evolve(IDLE, device=used({1: 5}), host=used({1: 2}))) == ""


def test_a_page_under_two_writers_shows(rank: SimRank) -> None:
    rank.copies.restores = Mode.HELD
    rank.copies.start_restore(Ticket(1), [2], [5])
    rank.peers.send_hold(Ticket(2), Rid("A"), Attempt(1), "p", PROMPT)
    rank.peers.send_want(Ticket(2), 0, [5], promise=0)
    facts = evolve(IDLE, device=used({1: 5}), host=used({1: 2}))
    assert "device page 5 is written while others use it" in broken(rank, facts)


def test_a_running_request_with_wrong_bytes_shows(rank: SimRank) -> None:
    request = running()
    request.tables = [(0, 1)]
    rank.memory.device[:2] = [request.prompt.value(0), page_value(PROMPT, 1)]
    facts = evolve(IDLE, device=used({1: 0, 2: 1}))
    assert "pages [1] of A do not hold" in broken(rank, facts, request)
    rank.memory.device[1] = request.prompt.value(1)
    assert broken(rank, facts, request) == ""
    assert "of A is free" in broken(rank, IDLE, request)


def test_a_cached_page_that_holds_other_tokens_shows(rank: SimRank) -> None:
    rank.memory.host[3] = page_value(PROMPT, 1)
    wrong = evolve(used({1: 3}), cached={3: page_value(PROMPT, 0)})
    assert "cached host pages [3] do not hold" in broken(rank, evolve(IDLE, host=wrong))
    right = evolve(used({1: 3}), cached={3: page_value(PROMPT, 1)})
    assert broken(rank, evolve(IDLE, host=right)) == ""


def test_a_device_page_in_two_tables_at_two_places_shows(rank: SimRank) -> None:
    request = running()
    request.tables = [(0, 0)]
    rank.memory.device[0] = request.prompt.value(0)
    assert "belongs to A and to A" in broken(rank, evolve(IDLE, device=used({1: 0})), request)


def test_a_second_reduction_in_a_tick_shows(rank: SimRank) -> None:
    for _ in range(2):
        rank.ranks.send([1])
        rank.ranks.verdict()
    assert "2 reductions in one tick" in broken(rank, IDLE)


def test_a_ticket_that_comes_back_shows(rank: SimRank) -> None:
    watch = Watch()
    opened = evolve(IDLE, open_tickets=frozenset({Ticket(4)}))
    found = [watch.broken([rank], [facts], []) for facts in (opened, IDLE, opened)]
    assert found[:2] == [[], []]
    assert "open again after their end" in found[2][0]


def test_a_ticket_that_is_used_twice_shows(rank: SimRank) -> None:
    rank.copies.start_restore(Ticket(1), [], [])
    rank.copies.start_mirror(Ticket(1), [], [])
    assert "used for a second effect" in broken(rank, IDLE)


def test_a_restore_in_pieces_is_one_restore(rank: SimRank) -> None:
    watch = Watch()
    opened = evolve(
        IDLE,
        device=used({1: 5, 2: 6}),
        host=used({1: 2, 2: 3}),
        open_tickets=frozenset({Ticket(1)}),
    )
    rank.copies.start_restore(Ticket(1), [2], [5])
    rank.copies.landed()
    rank.copies.start_restore(Ticket(1), [3], [6], 1)
    assert watch.broken([rank], [opened], []) == []


@pytest.mark.parametrize("start", [0, 2])
def test_a_piece_that_comes_twice_or_leaves_a_gap_shows(rank: SimRank, start: int) -> None:
    rank.copies.start_restore(Ticket(1), [2], [5])
    rank.copies.landed()
    rank.copies.start_restore(Ticket(1), [3], [6], start)
    said = broken(rank, evolve(IDLE, open_tickets=frozenset({Ticket(1)})))
    assert f"ticket 1 restores from page {start} on behind 1 pages" in said


def test_two_pieces_at_a_time_show(rank: SimRank) -> None:
    rank.copies.restores = Mode.HELD
    rank.copies.start_restore(Ticket(1), [2], [5])
    rank.copies.start_restore(Ticket(1), [3], [6], 1)
    assert "ticket 1 has 2 copies at a time" in broken(rank, IDLE)
