"""The file store where the world is unfriendly: writes let go, disks that fail late, clocks."""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvlift.core.landed import PersistEnded
from kvlift.effects.stores import files
from kvlift.effects.stores.page_file import HEADER_BYTES
from kvlift.effects.stores.workers import Urgency
from tests.effects.store_conformance import (
    LAST,
    N_PAGES,
    lookup,
    n_prefetched,
    new_ticket,
    part,
    persist,
    prompt_of,
    stored,
    whole,
)
from tests.effects.test_files import SMALL, FileWorld, Gate, files_under, pages_under, world_in

HOUR_NS = 3600 * 10**9


def start_and_let_go(world: FileWorld, gate: Gate) -> None:
    """A write of device page 0 that is let go while it stands in the gate."""
    ticket = new_ticket()
    world.store.start_persist_device(ticket, part(prompt_of(1), 0), (0,))
    gate.wait_for(1)
    world.store.cancel_persist(ticket)
    assert world.settle(1) == [PersistEnded(ticket, 0)]


def until_idle(world: FileWorld) -> None:
    assert world.store._workers.wait_idle(20)


@pytest.mark.parametrize("call", ["draft", "write_draft", "publish_draft"])
def test_a_write_that_was_let_go_never_reads_its_device_page_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with world_in(tmp_path, n_threads=2) as world:
        data = world.device.fill(0, 7)
        gate = Gate(monkeypatch, call)
        start_and_let_go(world, gate)
        world.device.fill(0, 99)  # From here on the page is another request's.
        gate.open()
        until_idle(world)
        n_found = lookup(world, part(prompt_of(1), 0))
        assert n_found == (call != "draft"), "what had been read is stored, nothing else"
        assert n_prefetched(world, part(prompt_of(1), 0), LAST[:1]) == n_found
        assert not n_found or world.host.content(LAST[0]) == data


@pytest.mark.parametrize("call", ["write_draft", "publish_draft"])
def test_a_write_that_was_let_go_leaves_nothing_behind_a_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with world_in(tmp_path, n_threads=2) as world:
        world.device.fill(0, 7)
        gate = Gate(monkeypatch, call)
        start_and_let_go(world, gate)
        world.store.forget_all()
        gate.open()
        until_idle(world)
        assert lookup(world, part(prompt_of(1), 0)) == 0
        assert pages_under(tmp_path) == set()


def test_a_file_whose_close_fails_too_is_still_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "as a network file system says it: at write, and at close again")
    bad: set[int] = set()
    real_write, real_close = os.pwritev, os.close

    def pwritev(descriptor: int, *more: object) -> int:
        if not threading.current_thread().name.startswith("kvlift-store"):
            return real_write(descriptor, *more)  # type: ignore[arg-type]
        bad.add(descriptor)
        raise full

    def close(descriptor: int) -> None:
        real_close(descriptor)
        if descriptor in bad:
            bad.remove(descriptor)
            raise full

    with world_in(tmp_path) as world:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", pwritev)
            patch.setattr(os, "close", close)
            assert persist(world, whole(prompt_of(1))) == 0
            until_idle(world)
        assert [path for path in files_under(tmp_path) if path.suffix == ".tmp"] == []


def test_an_account_that_cannot_be_written_costs_no_descriptor_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(*_: object) -> int:
        raise OSError(errno.EIO, "the block of the account is bad")

    with world_in(tmp_path) as world:
        until_idle(world)
        n_before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            for seed in range(5):
                assert persist(world, whole(prompt_of(seed))) == 0
            until_idle(world)
        assert len(os.listdir("/proc/self/fd")) == n_before
        assert [path for path in files_under(tmp_path) if path.suffix == ".tmp"] == []
        assert persist(world, whole(prompt_of(9))) == N_PAGES


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    real = time.time_ns
    return lambda by_ns: monkeypatch.setattr(time, "time_ns", lambda: real() + by_ns)


def test_what_was_written_before_the_clock_went_back_is_forgotten_too(
    tmp_path: Path, set_clock: Callable[[int], None]
) -> None:
    with world_in(tmp_path) as world:
        stored(world, prompt_of(1))
        set_clock(-HOUR_NS)
        world.store.forget_all()
        assert lookup(world, whole(prompt_of(1))) == 0
        assert pages_under(tmp_path) == set()


def test_a_full_store_takes_new_pages_after_the_clock_went_back(
    tmp_path: Path, set_clock: Callable[[int], None]
) -> None:
    with world_in(tmp_path, size_bytes_max=2 * N_PAGES * (HEADER_BYTES + SMALL)) as world:
        stored(world, prompt_of(1))
        stored(world, prompt_of(2))
        set_clock(-HOUR_NS)
        assert n_prefetched(world, whole(prompt_of(2)), LAST) == N_PAGES
        until_idle(world)
        assert persist(world, whole(prompt_of(3))) == N_PAGES
        of_first, of_second = (
            [world.path(prompt_of(seed), position).exists() for position in range(N_PAGES)]
            for seed in (1, 2)
        )
        assert all(of_second), "they were used since"
        assert not any(of_first)


def test_storage_that_hangs_keeps_neither_jobs_nor_prompts_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOOKUP_BYTES_MAX", 20 * len(prompt_of(1).tokens))
    with world_in(tmp_path, n_threads=2) as world:
        gate = Gate(monkeypatch, "read")
        stuck = [new_ticket(), new_ticket()]
        for ticket in stuck:
            world.store.start_prefetch(ticket, part(prompt_of(1), 0), LAST[:1])
        gate.wait_for(2)
        n_answered = 0
        for seed in range(400):
            ticket = new_ticket()
            world.store.start_prefetch(ticket, whole(prompt_of(seed)), LAST)
            world.store.cancel_prefetch(ticket)
            world.store.start_lookup(new_ticket(), whole(prompt_of(seed)))
            n_answered += len(world.store.landed())
        assert n_answered == 400 + 380, "cancelled reads, and lookups that are too many"
        assert sum(world.store._workers.n_waiting(urgency) for urgency in Urgency) < 500
        gate.open()
        world.settle(20 + len(stuck))
        assert lookup(world, whole(prompt_of(1))) == 0
        assert world.store._lookup_bytes == 0


def test_one_thread_that_hangs_in_care_does_not_keep_what_the_others_have_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "collect_orphans")
    with world_in(tmp_path, n_threads=2) as world:
        gate.wait_for(1)
        for seed in range(100):
            assert n_prefetched(world, whole(prompt_of(seed)), LAST) == 0
        assert world.store._workers.n_waiting(Urgency.CARE) < 10
        gate.open()
