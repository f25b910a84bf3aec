"""What every store must do, real or simulated: a test file for a store subclasses
`StoreConformance` and gives a `make_world` fixture."""

import mmap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Protocol, TypeAlias

from kvlift.core.ids import Ticket
from kvlift.core.keys import Namespace
from kvlift.core.landed import (
    Landed,
    LookupAnswered,
    PersistEnded,
    PrefetchEnded,
    PrefetchProgressed,
)
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.effects.ports import PageRun, Store

PAGE_TOKENS = 4
N_PAGES = 8

ENDINGS = (LookupAnswered, PrefetchEnded, PersistEnded)


class PlainPages:
    """Pages of plain, page-aligned memory: host pages and device memory in one."""

    def __init__(self, n_pages: int, page_bytes: int) -> None:
        self._n_pages = n_pages
        self._page_bytes = page_bytes
        self._memory = memoryview(mmap.mmap(-1, n_pages * page_bytes))

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    @property
    def n_pages(self) -> int:
        return self._n_pages

    def page_view(self, host_page: int) -> memoryview:
        return self._memory[host_page * self._page_bytes : (host_page + 1) * self._page_bytes]

    def write_page(self, device_page: int, data: memoryview) -> None:
        self.page_view(device_page)[:] = data

    def read_page(self, device_page: int, into: memoryview) -> None:
        into[:] = self.page_view(device_page)

    def fill(self, page: int, seed: int) -> bytes:
        """Bytes that tell pages and places in a page apart."""
        word = b"%08x" % (seed * 2654435761 % (1 << 32))
        data = (word * (self._page_bytes // len(word) + 1))[: self._page_bytes]
        data = data[:-1] + bytes([seed % 256])
        self.page_view(page)[:] = data
        return data

    def content(self, page: int) -> bytes:
        return bytes(self.page_view(page))


class StoreWorld(Protocol):
    """A store with everything around it that a test must reach."""

    host: PlainPages
    device: PlainPages

    @property
    def store(self) -> Store: ...

    def settle(self, n_endings: int) -> list[Landed]:
        """Reports in order, up to the `n_endings`-th ending; fails the test if they don't come."""

    def lose(self, prompt: Prompt, position: int) -> None: ...

    def corrupt(self, prompt: Prompt, position: int) -> None: ...

    def truncate(self, prompt: Prompt, position: int) -> None: ...

    def reopen(self) -> None:
        """A new store on what the old one left, as after a restart."""


MakeWorld: TypeAlias = Callable[[], AbstractContextManager[StoreWorld]]

_tickets = count(1)


def new_ticket() -> Ticket:
    return Ticket(next(_tickets))


def prompt_of(seed: int, n_pages: int = N_PAGES, tenant: str = "t") -> Prompt:
    namespace = Namespace(tenant=tenant, page_tokens=PAGE_TOKENS).digest()
    tokens = token_bytes([seed * 1000 + number for number in range(n_pages * PAGE_TOKENS)])
    return Prompt(namespace, tokens, PAGE_TOKENS)


def whole(prompt: Prompt) -> PageRun:
    return PageRun(prompt, tuple(range(prompt.n_pages_full)))


def part(prompt: Prompt, *positions: int) -> PageRun:
    return PageRun(prompt, positions)


def lookup(world: StoreWorld, run: PageRun) -> int:
    ticket = new_ticket()
    world.store.start_lookup(ticket, run)
    (report,) = world.settle(1)
    assert isinstance(report, LookupAnswered)
    assert report.ticket == ticket
    return report.n_pages


def persist(world: StoreWorld, run: PageRun, host_pages: Sequence[int] | None = None) -> int:
    ticket = new_ticket()
    places = range(len(run.positions)) if host_pages is None else host_pages
    world.store.start_persist(ticket, run, tuple(places))
    (report,) = world.settle(1)
    assert isinstance(report, PersistEnded)
    assert report.ticket == ticket
    return report.n_pages


def prefetch(world: StoreWorld, run: PageRun, host_pages: Sequence[int]) -> list[Landed]:
    """All reports of one read, checked: cumulative progress, one ending, at the end."""
    ticket = new_ticket()
    world.store.start_prefetch(ticket, run, host_pages)
    reports = world.settle(1)
    counts = []
    for report in reports:
        assert isinstance(report, PrefetchProgressed | PrefetchEnded)
        assert report.ticket == ticket
        counts.append(report.n_pages)
    assert counts == sorted(counts)
    assert isinstance(reports[-1], PrefetchEnded)
    return reports


def n_prefetched(world: StoreWorld, run: PageRun, host_pages: Sequence[int]) -> int:
    last = prefetch(world, run, host_pages)[-1]
    assert isinstance(last, PrefetchEnded)
    return last.n_pages


def stored(world: StoreWorld, prompt: Prompt) -> list[bytes]:
    """Writes all pages of `prompt` from the first host pages; their bytes."""
    run = whole(prompt)
    seed = int.from_bytes(prompt.namespace[:2], "little") + prompt.tokens[0]
    data = [world.host.fill(place, seed + place) for place in range(len(run.positions))]
    assert persist(world, run) == len(run.positions)
    return data


LAST = range(N_PAGES, 2 * N_PAGES)
"""Host pages that `stored` doesn't use."""


class StoreConformance:
    def test_an_empty_store_has_nothing(self, make_world: MakeWorld) -> None:
        with make_world() as world:
            assert lookup(world, whole(prompt_of(1))) == 0
            assert n_prefetched(world, whole(prompt_of(1)), LAST) == 0

    def test_pages_come_back_as_they_were(self, make_world: MakeWorld) -> None:
        with make_world() as world:
            prompt = prompt_of(1)
            data = stored(world, prompt)
            assert lookup(world, whole(prompt)) == N_PAGES
            assert n_prefetched(world, whole(prompt), LAST) == N_PAGES
            assert [world.host.content(place) for place in LAST] == data

    def test_any_positions_go_to_any_places(self, make_world: MakeWorld) -> None:
        with make_world() as world:
            prompt = prompt_of(1)
            data = stored(world, prompt)
            assert lookup(world, part(prompt, 5, 2)) == 2
            assert n_prefetched(world, part(prompt, 5, 2), (15, 9)) == 2
            assert world.host.content(15) == data[5]
            assert world.host.content(9) == data[2]

    def test_an_equal_prompt_finds_the_pages_and_a_longer_one_its_prefix(
        self, make_world: MakeWorld
    ) -> None:
        with make_world() as world:
            stored(world, prompt_of(1))
            assert lookup(world, whole(prompt_of(1))) == N_PAGES
            longer = prompt_of(1).with_tokens(token_bytes([7] * PAGE_TOKENS))
            assert lookup(world, whole(longer)) == N_PAGES

    def test_two_tenants_never_meet(self, make_world: MakeWorld) -> None:
        with make_world() as world:
            stored(world, prompt_of(1, tenant="a"))
            assert lookup(world, whole(prompt_of(1, tenant="b"))) == 0
            assert n_prefetched(world, whole(prompt_of(1, tenant="b")), LAST) == 0

    def test_a_lookup_counts_to_the_first_hole(self, make_world: MakeWorld) -> None:
        with make_world() as world:
            prompt = prompt_of(1)
            assert persist(world, part(prompt, 0, 1, 3)) == 3
            assert lookup(world, whole(prompt)) == 2
            assert lookup(world, part(prompt, 2, 3)) == 0
            assert lookup(world, part(prompt, 3)) == 1

    def test_a_missing_page_ends_the_read_there(self, make_world: MakeWorld) -> None:
        with make_world() as world:
            prompt = prompt_of(1)
            data = stored(world, prompt)
            world.lose(prompt, 3)
            assert n_prefetched(world, whole(prompt), LAST) == 3
            assert [world.host.content(place) for place in LAST[:3]] == data[:3]
            assert lookup(world, whole(prompt)) == 3

    def test_a_damaged_page_ends_the_read_and_is_no_hit_until_written_again(
        self, make_world: MakeWorld
    ) -> None:
        with make_world() as world:
            prompt = prompt_of(1)
            data = stored(world, prompt)
            world.corrupt(prompt, 4)
            assert n_prefetched(world, whole(prompt), LAST) == 4
            assert lookup(world, whole(prompt)) == 4
            assert persist(world, part(prompt, 4), [4]) == 1
            assert n_prefetched(world, whole(prompt), LAST) == N_PAGES
            assert [world.host.content(place) for place in LAST] == data

    def test_a_truncated_page_ends_the_read_and_is_no_hit_until_written_again(
        self, make_world: MakeWorld
    ) -> None:
        with make_world() as world:
            prompt = prompt_of(1)
            stored(world, prompt)
            world.truncate(prompt, 0)
            assert n_prefetched(world, whole(prompt), LAST) == 0
            assert lookup(world, whole(prompt)) == 0
            assert persist(world, part(prompt, 0), [0]) == 1
            assert lookup(world, whole(prompt)) == N_PAGES

    def test_a_page_that_is_there_counts_as_written(self, make_world: MakeWorld) -> None:
        with make_world() as world:
            prompt = prompt_of(1)
            stored(world, prompt)
            assert persist(world, whole(prompt)) == N_PAGES
            assert lookup(world, whole(prompt)) == N_PAGES

    def test_pages_are_written_from_the_device(self, make_world: MakeWorld) -> None:
        with make_world() as world:
            prompt, ticket = prompt_of(1), new_ticket()
            data = [world.device.fill(place, 50 + place) for place in range(N_PAGES)]
            world.store.start_persist_device(ticket, whole(prompt), tuple(range(N_PAGES)))
            assert world.settle(1) == [PersistEnded(ticket, N_PAGES)]
            assert n_prefetched(world, whole(prompt), LAST) == N_PAGES
            assert [world.host.content(place) for place in LAST] == data

    def test_an_empty_run_is_answered_with_nothing(self, make_world: MakeWorld) -> None:
        with make_world() as world:
            empty = part(prompt_of(1))
            assert lookup(world, empty) == 0
            assert n_prefetched(world, empty, ()) == 0
            assert persist(world, empty, ()) == 0

    def test_many_runs_at_once_are_each_answered_once(self, make_world: MakeWorld) -> None:
        with make_world() as world:
            prompts = [prompt_of(seed) for seed in range(4)]
            for prompt in prompts:
                stored(world, prompt)
            reads = {new_ticket(): prompt for prompt in prompts}
            for number, (ticket, prompt) in enumerate(reads.items()):
                places = LAST[2 * number : 2 * number + 2]
                world.store.start_prefetch(ticket, part(prompt, 0, 1), places)
            asked = {new_ticket(): prompt for prompt in prompts}
            for ticket, prompt in asked.items():
                world.store.start_lookup(ticket, whole(prompt))
            reports = world.settle(8)
            ended = {r.ticket: r.n_pages for r in reports if isinstance(r, ENDINGS)}
            assert ended == dict.fromkeys(reads, 2) | dict.fromkeys(asked, N_PAGES)
            assert world.settle(0) == []

    def test_a_cancelled_read_still_ends_and_only_once(self, make_world: MakeWorld) -> None:
        with make_world() as world:
            prompt, ticket = prompt_of(1), new_ticket()
            data = stored(world, prompt)
            world.store.start_prefetch(ticket, whole(prompt), LAST)
            world.store.cancel_prefetch(ticket)
            reports = world.settle(1)
            world.store.cancel_prefetch(ticket)
            world.store.cancel_prefetch(new_ticket())
            assert world.settle(0) == []
            last = reports[-1]
            assert isinstance(last, PrefetchEnded)
            good = LAST[: last.n_pages]
            assert [world.host.content(place) for place in good] == data[: last.n_pages]

    def test_what_was_forgotten_is_gone_and_can_be_written_again(
        self, make_world: MakeWorld
    ) -> None:
        with make_world() as world:
            prompt = prompt_of(1)
            stored(world, prompt)
            world.store.forget_all()
            assert lookup(world, whole(prompt)) == 0
            assert n_prefetched(world, whole(prompt), LAST) == 0
            stored(world, prompt)
            assert lookup(world, whole(prompt)) == N_PAGES

    def test_a_write_that_was_under_way_when_all_was_forgotten_leaves_nothing(
        self, make_world: MakeWorld
    ) -> None:
        with make_world() as world:
            prompt, ticket = prompt_of(1), new_ticket()
            world.store.start_persist(ticket, whole(prompt), tuple(range(N_PAGES)))
            world.store.forget_all()
            ended = world.settle(1)[-1]
            assert isinstance(ended, PersistEnded)
            assert ended.ticket == ticket
            assert lookup(world, whole(prompt)) == 0

    def test_pages_outlive_the_store_object(self, make_world: MakeWorld) -> None:
        with make_world() as world:
            prompt = prompt_of(1)
            data = stored(world, prompt)
            world.reopen()
            assert lookup(world, whole(prompt)) == N_PAGES
            assert n_prefetched(world, whole(prompt), LAST) == N_PAGES
            assert [world.host.content(place) for place in LAST] == data

    def test_closing_answers_what_was_started(self, make_world: MakeWorld) -> None:
        with make_world() as world:
            prompt = prompt_of(1)
            stored(world, prompt)
            tickets = [new_ticket() for _ in range(3)]
            world.store.start_prefetch(tickets[0], whole(prompt), LAST)
            world.store.start_persist(tickets[1], whole(prompt_of(2)), tuple(range(N_PAGES)))
            world.store.start_lookup(tickets[2], whole(prompt))
            assert world.store.close(20.0)
            ended = [r.ticket for r in world.store.landed() if isinstance(r, ENDINGS)]
            assert sorted(ended) == tickets
