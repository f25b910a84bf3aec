"""What a request is offered: beside plain counting, and at the edges of each condition."""

from collections.abc import ValuesView

import hypothesis.strategies as st
import pytest
from attrs import evolve
from hypothesis import given

from kvlift.core.admission import (
    Offer,
    _is_slower_than_peer,
    _n_idle,
    _n_reserved_for_growth,
    admit,
    further_ones,
    n_pages_in_common,
    offer_for,
)
from kvlift.core.agreed import Kind, Rates, Request, agreed_at_start
from kvlift.core.draft import Draft
from kvlift.core.effect import StartLookup
from kvlift.core.ids import Attempt, DeviceHandle, Rid, Ticket
from kvlift.core.phase import Filling, Ready, Resuming, Waiting
from kvlift.core.plan import Bounds, Lease, Plan
from kvlift.core.policy import Policy, Switch
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier
from tests.core.scenario import prompt_of

POLICY = Policy(n_device_pages=12, n_host_pages=12, ballot_slots=8)


def draft_of(policy: Policy = POLICY, storage: Switch = Switch.ON) -> Draft:
    return Draft(agreed_at_start(policy, storage), policy)


def put(draft: Draft, tier: Tier, prompt: Prompt, start: int, stop: int) -> None:
    """Pages in the index, with pages of the ledger under them."""
    draft.index.extend(prompt, stop, now=draft.moment(), priority=0)
    for segment in list(draft.index.cover(prompt, start, stop)):
        now = draft.index.segments[segment.id]
        if tier is Tier.DEVICE:
            draft.index.set_device(now, draft.take_device(now.n_pages))
        else:
            draft.index.set_host(now, draft.take_host(now.n_pages))


def offer_now(draft: Draft, request: Request) -> Offer | None:
    return offer_for(draft, request, further_ones(draft))


def wait(
    draft: Draft,
    rid: str,
    prompt: Prompt,
    *,
    stored: tuple[int, int] = (0, 0),
    n_lookups: int = 0,
    n_bypassed: int = 0,
    priority: int = 0,
) -> Request:
    """A request in the queue whose storage lookup has answered."""
    attempt = Attempt(draft.next_attempt)
    draft.next_attempt += 1
    hold = draft.open_ticket(Kind.HOLD, attempt, 0)
    request = Request(
        rid=Rid(rid),
        attempt=attempt,
        prompt=prompt,
        n_tokens_prompt=prompt.n_pages * prompt.page_tokens,
        peer="p",
        priority=priority,
        n_pages_output=0,
        hold=hold,
        phase=Waiting(
            stored_start=stored[0],
            stored_stop=stored[1],
            n_lookups=n_lookups,
            n_bypassed=n_bypassed,
        ),
    )
    draft.requests[attempt] = request
    draft.attempt_by_rid[request.rid] = attempt
    return request


PAGES = st.lists(st.integers(1, 2), max_size=9)


@given(one=PAGES, other=PAGES, odd=st.booleans(), at_least=st.integers(0, 9))
def test_pages_in_common_are_counted_as_one_counts_them(
    one: list[int], other: list[int], *, odd: bool, at_least: int
) -> None:
    n_common = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        n_common += 1
    found = n_pages_in_common(prompt_of(*one, odd=odd), prompt_of(*other), at_least)
    assert found == max(n_common, at_least)


def test_long_prompts_have_as_many_pages_in_common_as_they_have() -> None:
    for n_common in range(12):
        one = prompt_of(*range(1, 13))
        other = prompt_of(*range(1, n_common + 1), *[50] * (12 - n_common))
        for at_least in range(n_common + 2):
            assert n_pages_in_common(one, other, at_least) == max(n_common, at_least)


def test_prompts_of_two_tenants_have_nothing_in_common() -> None:
    other = Prompt(b"x" * 32, prompt_of(1, 2).tokens, 2)
    assert n_pages_in_common(prompt_of(1, 2), other, 0) == 0


@pytest.mark.parametrize(
    ("prefetch_us", "transfer_us", "percent", "slower"),
    [
        (101, 100, 100, True),
        (100, 100, 100, False),
        (149, 100, 150, False),
        (151, 100, 150, True),
        (0, 100, 100, False),
        (100, 0, 100, False),
        (0, 0, 100, False),
    ],
)
def test_a_read_is_slower_only_where_both_rates_say_so(
    prefetch_us: int, transfer_us: int, percent: int, *, slower: bool
) -> None:
    for model in Switch:
        policy = evolve(POLICY, cost_model=model, cost_threshold_percent=percent)
        draft = draft_of(policy)
        draft.rates = Rates(prefetch_us=prefetch_us, transfer_us=transfer_us)
        assert _is_slower_than_peer(draft) is (slower and model is Switch.ON)


def test_only_pages_of_the_range_that_nobody_pins_are_idle() -> None:
    draft = draft_of()
    prompt = prompt_of(1, 2, 3, 4, 5)
    put(draft, Tier.DEVICE, prompt, 0, 3)
    put(draft, Tier.HOST, prompt, 2, 5)
    draft.index.pin(Tier.DEVICE, prompt, 0, 1)
    draft.index.pin(Tier.HOST, prompt, 4, 5)
    assert _n_idle(draft, prompt, Tier.DEVICE, 0, 5) == 2
    assert _n_idle(draft, prompt, Tier.DEVICE, 0, 2) == 1
    assert _n_idle(draft, prompt, Tier.DEVICE, 2, 3) == 1
    assert _n_idle(draft, prompt, Tier.DEVICE, 3, 5) == 0
    assert _n_idle(draft, prompt, Tier.HOST, 0, 5) == 2
    assert _n_idle(draft, prompt, Tier.HOST, 3, 5) == 1
    assert _n_idle(draft, prompt, Tier.HOST, 0, 2) == 0


@pytest.mark.parametrize("reserve", [0, 1, 3])
def test_the_reserve_counts_requests_that_are_further(reserve: int) -> None:
    draft = draft_of(evolve(POLICY, decode_reserve_pages=reserve))
    wait(draft, "A", prompt_of(1))
    other = wait(draft, "B", prompt_of(2))
    assert _n_reserved_for_growth(draft.policy, further_ones(draft)) == 0
    plan = Plan(bounds=Bounds(device=0, shared=0, host=0, storage=0), n_pages=1, promise=0)
    lease = Lease(n_shared=0, own=(DeviceHandle(1),))
    draft.put_phase(other.attempt, Ready(plan=plan, lease=lease))
    assert _n_reserved_for_growth(draft.policy, further_ones(draft)) == reserve


@pytest.mark.parametrize(("n_free", "offered"), [(3, False), (4, True), (12, True)])
def test_an_offer_is_made_when_every_page_fits(n_free: int, *, offered: bool) -> None:
    draft = draft_of()
    draft.ledger = evolve(draft.ledger, device_room=n_free)
    offer = offer_now(draft, wait(draft, "A", prompt_of(1, 2, 3, odd=1)))
    assert (offer is not None) is offered
    if offer is not None:
        assert offer.n_device == 4


def test_cached_pages_of_the_prompt_are_no_room_for_its_other_pages() -> None:
    draft = draft_of()
    prompt = prompt_of(1, 2, 3, 4)
    put(draft, Tier.DEVICE, prompt, 0, 2)
    request = wait(draft, "A", prompt)
    draft.ledger = evolve(draft.ledger, device_room=4)
    offer = offer_now(draft, request)
    assert offer is not None
    assert (offer.n_device, offer.n_fetch, offer.leader) == (2, 0, None)
    assert offer.bounds == Bounds(device=2, shared=2, host=2, storage=2)
    draft.ledger = evolve(draft.ledger, device_room=3)
    assert offer_now(draft, request) is None, "its own two pages cannot be evicted for it"


@pytest.mark.parametrize(
    ("stored", "n_host_free", "minimum", "n_fetch"),
    [
        ((0, 4), 12, 1, 3),
        ((1, 4), 12, 1, 3),
        ((2, 4), 12, 1, 0),
        ((0, 1), 12, 1, 0),
        ((0, 2), 12, 1, 1),
        ((0, 2), 12, 2, 0),
        ((0, 4), 2, 1, 2),
        ((0, 4), 2, 2, 2),
        ((0, 4), 2, 3, 0),
        ((0, 4), 0, 1, 0),
    ],
)
def test_storage_gives_what_lies_behind_the_host_and_has_room(
    stored: tuple[int, int], n_host_free: int, minimum: int, n_fetch: int
) -> None:
    draft = draft_of(evolve(POLICY, prefetch_min_pages=minimum))
    prompt = prompt_of(1, 2, 3, 4)
    put(draft, Tier.HOST, prompt, 0, 1)
    draft.ledger = evolve(draft.ledger, host_room=1 + n_host_free)
    offer = offer_now(draft, wait(draft, "A", prompt, stored=stored))
    assert offer is not None
    assert offer.n_fetch == n_fetch
    assert offer.bounds == Bounds(device=0, shared=0, host=1, storage=1 + n_fetch)
    draft.storage = Switch.OFF
    offer = offer_now(draft, wait(draft, "B", prompt, stored=stored))
    assert offer is not None
    assert offer.n_fetch == 0


def test_pages_of_the_host_that_are_restored_are_no_room_for_the_read() -> None:
    draft = draft_of()
    prompt, other = prompt_of(1, 2, 3), prompt_of(7, 8)
    put(draft, Tier.HOST, prompt, 0, 1)
    put(draft, Tier.HOST, other, 0, 1)
    draft.ledger = evolve(draft.ledger, host_room=2)
    offer = offer_now(draft, wait(draft, "A", prompt, stored=(0, 3)))
    assert offer is not None
    assert offer.n_fetch == 1, "the idle page of the other prompt, not its own"


def looked_up(draft: Draft) -> list[tuple[int, int, int]]:
    """(start, stop, pages that the ticket counts) of each lookup that has begun."""
    return [
        (e.start, e.stop, draft.tickets[e.ticket].n_pages)
        for e in draft.effects
        if isinstance(e, StartLookup)
    ]


@pytest.mark.parametrize(
    ("n_on_host", "stored_start", "n_lookups", "storage", "asked"),
    [
        (1, 2, 0, Switch.ON, [(1, 4, 3)]),
        (2, 2, 0, Switch.ON, []),
        (3, 2, 0, Switch.ON, []),
        (1, 2, 1, Switch.ON, [(1, 4, 3)]),
        (1, 2, 2, Switch.ON, []),
        (1, 2, 0, Switch.OFF, []),
        (4, 9, 0, Switch.ON, []),
    ],
)
def test_storage_is_asked_again_for_pages_that_have_left_the_index(
    n_on_host: int,
    stored_start: int,
    n_lookups: int,
    storage: Switch,
    asked: list[tuple[int, int, int]],
) -> None:
    draft = draft_of(evolve(POLICY, lookups_again_max=2), storage)
    prompt = prompt_of(1, 2, 3, 4)
    put(draft, Tier.HOST, prompt, 0, n_on_host)
    request = wait(draft, "A", prompt, stored=(stored_start, 4), n_lookups=n_lookups)
    wait(draft, "B", prompt_of(9))
    admit(draft)
    assert looked_up(draft) == asked
    phase = type(draft.requests[request.attempt].phase).__name__
    assert phase == ("Asking" if asked else "Filling")
    behind = draft.request(Rid("B"))
    assert behind is not None
    assert type(behind.phase).__name__ == "Filling", "who asks again holds nobody up"


def test_each_request_that_passes_counts_once_for_each_that_it_passes() -> None:
    draft = draft_of(evolve(POLICY, bypass_max=3))
    draft.ledger = evolve(draft.ledger, device_room=4)
    large = wait(draft, "A", prompt_of(1, 2, 3, 4, 5))
    larger = wait(draft, "B", prompt_of(2, 2, 3, 4, 5, 6))
    small = wait(draft, "C", prompt_of(3), n_bypassed=2)
    smaller = wait(draft, "D", prompt_of(4))
    admit(draft)

    def n_bypassed(request: Request) -> int | None:
        phase = draft.requests[request.attempt].phase
        return phase.n_bypassed if isinstance(phase, Waiting) else None

    assert [n_bypassed(r) for r in (large, larger, small, smaller)] == [2, 2, None, None]


def test_who_has_been_overtaken_often_enough_holds_the_line() -> None:
    draft = draft_of(evolve(POLICY, bypass_max=2))
    draft.ledger = evolve(draft.ledger, device_room=4)
    wait(draft, "A", prompt_of(1, 2, 3, 4, 5), n_bypassed=2)
    small = wait(draft, "B", prompt_of(3))
    admit(draft)
    assert isinstance(draft.requests[small.attempt].phase, Waiting)


def test_the_line_is_by_priority_and_then_by_age() -> None:
    draft = draft_of()
    draft.ledger = evolve(draft.ledger, device_room=1)
    old = wait(draft, "A", prompt_of(1))
    urgent = wait(draft, "B", prompt_of(2), priority=1)
    admit(draft)
    assert isinstance(draft.requests[old.attempt].phase, Waiting)
    assert not isinstance(draft.requests[urgent.attempt].phase, Waiting)


def test_who_waits_for_a_copy_of_its_own_is_neither_admitted_nor_overtaken() -> None:
    draft = draft_of()
    plan = Plan(bounds=Bounds(device=0, shared=0, host=0, storage=0), n_pages=1, promise=0)
    resuming = Resuming(
        plan=plan, n_pages_pinned=0, tail_device=None, tail_host=None, tail_copy=Ticket(9)
    )
    first = wait(draft, "A", prompt_of(1))
    draft.put_phase(first.attempt, resuming)
    second = wait(draft, "B", prompt_of(2))
    admit(draft)
    assert draft.requests[first.attempt].phase == resuming
    assert isinstance(draft.requests[second.attempt].phase, Filling)


class CountedRequests(dict[Attempt, Request]):
    """How often somebody went through all of them."""

    n_walks = 0

    def values(self) -> ValuesView[Request]:  # type: ignore[override]
        self.n_walks += 1
        return super().values()


def test_a_long_queue_is_gone_through_as_often_as_a_short_one() -> None:
    n_walks = []
    for n_waiting in (1, 64):
        draft = draft_of(evolve(POLICY, decode_reserve_pages=1))
        draft.ledger = evolve(draft.ledger, device_room=0)
        for number in range(n_waiting):
            wait(draft, f"r{number}", prompt_of(number))
        draft.requests = CountedRequests(draft.requests)
        admit(draft)
        n_walks.append(draft.requests.n_walks)
    assert n_walks == [2, 2]


def test_who_is_admitted_in_this_tick_counts_for_the_next_in_line() -> None:
    """For the reserve, and as a leader."""
    draft = draft_of(evolve(POLICY, decode_reserve_pages=3))
    draft.ledger = evolve(draft.ledger, device_room=7)
    prompt = prompt_of(1, 2)
    first, second = wait(draft, "A", prompt), wait(draft, "B", prompt)
    third = wait(draft, "C", prompt)
    admit(draft)
    assert isinstance(draft.requests[first.attempt].phase, Filling)
    followed = draft.requests[second.attempt].phase
    assert isinstance(followed, Filling)
    assert followed.follow is not None
    assert followed.follow.leader == first.attempt
    assert isinstance(draft.requests[third.attempt].phase, Waiting), "2 + 2 of 7, and 6 kept"


def test_a_leader_is_found_behind_one_that_brings_nothing() -> None:
    draft = draft_of()
    first, second = wait(draft, "A", prompt_of(9)), wait(draft, "B", prompt_of(1, 2))
    admit(draft)
    filling = draft.requests[first.attempt].phase
    assert isinstance(filling, Filling)
    draft.put_phase(first.attempt, Ready(plan=filling.plan, lease=filling.lease))
    offer = offer_now(draft, wait(draft, "C", prompt_of(1, 2)))
    assert offer is not None
    assert offer.leader == second.attempt
