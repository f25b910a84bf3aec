"""What every `Copies` must do, real or simulated. A test module builds a world and runs CHECKS.

A world gives the port and a way to read and write pages beside it. `settle` lets everything that
was started land (real ports: wait; simulated ones: run them).
"""

import random
import time
from collections.abc import Callable, Sequence

import pytest
from attrs import define

from kvlift.core.ids import Ticket
from kvlift.core.landed import Landed, MirrorEnded, RestoreEnded
from kvlift.effects.ports import Copies


@define(eq=False)
class CopiesWorld:
    copies: Copies
    n_host_pages: int
    n_device_pages: int
    page_bytes: int
    write_host: Callable[[int, bytes], None]
    read_host: Callable[[int], bytes]
    write_device: Callable[[int, bytes], None]
    read_device: Callable[[int], bytes]
    settle: Callable[[], None]


def random_page(world: CopiesWorld, rng: random.Random) -> bytes:
    return rng.randbytes(world.page_bytes)


def collected(world: CopiesWorld, n_reports: int, timeout_s: float = 10.0) -> list[Landed]:
    """Exactly `n_reports` reports, with the world settled."""
    reports: list[Landed] = []
    deadline = time.monotonic() + timeout_s
    while len(reports) < n_reports and time.monotonic() < deadline:
        world.settle()
        reports += world.copies.landed()
    world.settle()
    reports += world.copies.landed()
    assert len(reports) == n_reports, reports
    return reports


def fill_host(world: CopiesWorld, pages: Sequence[int], rng: random.Random) -> list[bytes]:
    contents = [random_page(world, rng) for _ in pages]
    for page, content in zip(pages, contents, strict=True):
        world.write_host(page, content)
    return contents


def fill_device(world: CopiesWorld, pages: Sequence[int], rng: random.Random) -> list[bytes]:
    contents = [random_page(world, rng) for _ in pages]
    for page, content in zip(pages, contents, strict=True):
        world.write_device(page, content)
    return contents


def a_restore_brings_every_page_to_its_place_and_touches_no_other(world: CopiesWorld) -> None:
    rng = random.Random(1)
    everywhere = range(world.n_device_pages)
    before = fill_device(world, everywhere, rng)
    n = min(world.n_host_pages, world.n_device_pages) - 2
    host_pages = rng.sample(range(world.n_host_pages), n)
    device_pages = rng.sample(everywhere, n)
    contents = fill_host(world, host_pages, rng)
    world.copies.start_restore(Ticket(7), host_pages, device_pages)
    assert collected(world, 1) == [RestoreEnded(Ticket(7), n)]
    expected = dict(enumerate(before)) | dict(zip(device_pages, contents, strict=True))
    assert {page: world.read_device(page) for page in everywhere} == expected
    assert [world.read_host(page) for page in host_pages] == contents


def a_mirror_brings_every_page_to_its_place_and_touches_no_other(world: CopiesWorld) -> None:
    rng = random.Random(2)
    everywhere = range(world.n_host_pages)
    before = fill_host(world, everywhere, rng)
    n = min(world.n_host_pages, world.n_device_pages) - 2
    host_pages = rng.sample(everywhere, n)
    device_pages = rng.sample(range(world.n_device_pages), n)
    contents = fill_device(world, device_pages, rng)
    world.copies.start_mirror(Ticket(8), device_pages, host_pages)
    assert collected(world, 1) == [MirrorEnded(Ticket(8), n)]
    expected = dict(enumerate(before)) | dict(zip(host_pages, contents, strict=True))
    assert {page: world.read_host(page) for page in everywhere} == expected
    assert [world.read_device(page) for page in device_pages] == contents


def adjacent_pages_are_copied_like_any_others(world: CopiesWorld) -> None:
    rng = random.Random(3)
    n = min(world.n_host_pages, world.n_device_pages)
    contents = fill_host(world, range(n), rng)
    world.copies.start_restore(Ticket(1), range(n), range(n))
    collected(world, 1)
    assert [world.read_device(page) for page in range(n)] == contents


def many_jobs_in_flight_each_report_once_with_their_own_pages(world: CopiesWorld) -> None:
    rng = random.Random(4)
    half = min(world.n_host_pages, world.n_device_pages) // 2
    up = fill_host(world, range(half), rng)
    down = fill_device(world, range(half, 2 * half), rng)
    for page in range(half):
        world.copies.start_restore(Ticket(page), [page], [page])
        world.copies.start_mirror(Ticket(half + page), [half + page], [half + page])
    reports = collected(world, 2 * half)
    assert {report.ticket for report in reports} == set(range(2 * half))
    for report in reports:
        assert isinstance(report, RestoreEnded if report.ticket < half else MirrorEnded)
        assert report.n_pages == 1
    assert [world.read_device(page) for page in range(half)] == up
    assert [world.read_host(page) for page in range(half, 2 * half)] == down


def a_reported_job_has_its_bytes_in_place_whatever_else_still_runs(world: CopiesWorld) -> None:
    rng = random.Random(5)
    n = min(world.n_host_pages, world.n_device_pages)
    contents = fill_host(world, range(n), rng)
    for page in range(n):
        world.copies.start_restore(Ticket(page), [page], [page])
    seen = 0
    deadline = time.monotonic() + 10
    while seen < n and time.monotonic() < deadline:
        for report in world.copies.landed():
            assert world.read_device(int(report.ticket)) == contents[report.ticket]
            seen += 1
        if not seen:
            world.settle()
    seen += len(collected(world, n - seen))
    assert seen == n


def nothing_is_reported_twice(world: CopiesWorld) -> None:
    world.copies.start_restore(Ticket(1), [0], [0])
    collected(world, 1)
    world.settle()
    assert world.copies.landed() == []


def a_job_without_pages_ends_too(world: CopiesWorld) -> None:
    world.copies.start_restore(Ticket(1), [], [])
    world.copies.start_mirror(Ticket(2), [], [])
    reports = collected(world, 2)
    assert set(reports) == {RestoreEnded(Ticket(1), 0), MirrorEnded(Ticket(2), 0)}


def closing_waits_for_what_runs_and_its_bytes_are_right(world: CopiesWorld) -> None:
    rng = random.Random(6)
    (content,) = fill_host(world, [1], rng)
    world.copies.start_restore(Ticket(1), [1], [0])
    world.settle()
    assert world.copies.close(10.0)
    (report,) = world.copies.landed()
    assert isinstance(report, RestoreEnded)
    if report.n_pages == 1:
        assert world.read_device(0) == content


def the_pieces_of_a_restore_say_which_they_are(world: CopiesWorld) -> None:
    """One after the other under one ticket, each with the number of its first page."""
    contents = fill_host(world, range(3), random.Random(9))
    world.copies.start_restore(Ticket(1), [0], [2], 0)
    assert collected(world, 1) == [RestoreEnded(Ticket(1), 1, 0)]
    world.copies.start_restore(Ticket(1), [1, 2], [1, 0], 1)
    assert collected(world, 1) == [RestoreEnded(Ticket(1), 2, 1)]
    assert [world.read_device(page) for page in (2, 1, 0)] == contents


CHECKS: tuple[Callable[[CopiesWorld], None], ...] = (
    a_restore_brings_every_page_to_its_place_and_touches_no_other,
    a_mirror_brings_every_page_to_its_place_and_touches_no_other,
    adjacent_pages_are_copied_like_any_others,
    many_jobs_in_flight_each_report_once_with_their_own_pages,
    a_reported_job_has_its_bytes_in_place_whatever_else_still_runs,
    nothing_is_reported_twice,
    a_job_without_pages_ends_too,
    the_pieces_of_a_restore_say_which_they_are,
    closing_waits_for_what_runs_and_its_bytes_are_right,
)


def bad_jobs_raise_and_start_nothing(world: CopiesWorld) -> None:
    """For real ports, which check their callers."""
    copies = world.copies
    with pytest.raises(ValueError, match="host pages for"):
        copies.start_restore(Ticket(1), [0, 1], [0])
    with pytest.raises(IndexError, match="host page"):
        copies.start_restore(Ticket(2), [world.n_host_pages], [0])
    with pytest.raises(IndexError, match="device page"):
        copies.start_mirror(Ticket(3), [-1], [0])
    world.settle()
    assert copies.landed() == []
    copies.start_restore(Ticket(4), [0], [0])
    assert collected(world, 1) == [RestoreEnded(Ticket(4), 1)]
    assert copies.close(5.0)
    with pytest.raises(RuntimeError, match="closed"):
        copies.start_restore(Ticket(5), [0], [0])
