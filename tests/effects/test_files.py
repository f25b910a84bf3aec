import errno
import json
import logging
import os
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from attrs import define, field

from kvlift.core.keys import page_keys
from kvlift.core.landed import Landed, PersistEnded, PrefetchEnded
from kvlift.core.policy import Switch
from kvlift.core.prompt import Prompt
from kvlift.effects.stores import file_medium, page_file
from kvlift.effects.stores.file_medium import FileMedium, Fsync
from kvlift.effects.stores.files import FileStore
from kvlift.effects.stores.folder import Folder, StoreRefusedError, is_orphan
from kvlift.effects.stores.page_file import HEADER_BYTES, Caching
from kvlift.effects.stores.usage import Usage
from tests.effects.store_conformance import (
    ENDINGS,
    LAST,
    N_PAGES,
    MakeWorld,
    PlainPages,
    StoreConformance,
    lookup,
    n_prefetched,
    new_ticket,
    part,
    persist,
    prompt_of,
    stored,
    whole,
)

SMALL = 1000
LARGE = file_medium.DIRECT_BYTES_MIN
ROOT = Path(__file__).parents[2]


@define
class FileWorld:
    root: Path
    host: PlainPages
    device: PlainPages
    options: dict[str, object] = field(factory=dict)
    store: FileStore = field(init=False)
    landed_event: threading.Event = field(factory=threading.Event)

    def __attrs_post_init__(self) -> None:
        self.store = self.open()

    def open(self) -> FileStore:
        return FileStore(
            self.root,
            self.host,
            self.device,
            on_landed=self.landed_event.set,
            **self.options,  # type: ignore[arg-type]
        )

    def settle(self, n_endings: int) -> list[Landed]:
        reports: list[Landed] = []
        while sum(isinstance(report, ENDINGS) for report in reports) < n_endings:
            assert self.landed_event.wait(20), f"only {reports} came"
            self.landed_event.clear()
            reports += self.store.landed()
        return reports + self.store.landed()

    def path(self, prompt: Prompt, position: int) -> Path:
        keys = list(page_keys(prompt.namespace, prompt.tokens, prompt.page_tokens))
        return Path(Folder(self.root).page_path(keys[position]))

    def lose(self, prompt: Prompt, position: int) -> None:
        self.path(prompt, position).unlink()

    def corrupt(self, prompt: Prompt, position: int) -> None:
        data = bytearray(self.path(prompt, position).read_bytes())
        data[-7] ^= 0x10
        self.path(prompt, position).write_bytes(data)

    def truncate(self, prompt: Prompt, position: int) -> None:
        path = self.path(prompt, position)
        os.truncate(path, path.stat().st_size // 2)

    def reopen(self) -> None:
        assert self.store.close(10)
        self.store = self.open()


def files_under(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def pages_under(root: Path) -> set[Path]:
    return {path for path in files_under(root) if path.suffix == ".page"}


def bytes_under(root: Path) -> int:
    return sum(
        path.stat().st_size for path in files_under(root) if path.suffix in (".page", ".tmp")
    )


@contextmanager
def world_in(root: Path, page_bytes: int = SMALL, **options: object) -> Iterator[FileWorld]:
    world = FileWorld(
        root, PlainPages(2 * N_PAGES, page_bytes), PlainPages(N_PAGES, page_bytes), options
    )
    try:
        yield world
    finally:
        assert world.store.close(10)
        left = [path for path in files_under(root) if path.suffix == ".tmp"]
        assert left == [], "temporary files are left"


@pytest.fixture(params=[SMALL, LARGE], ids=["buffered", "direct"])
def make_world(request: pytest.FixtureRequest, tmp_path: Path) -> MakeWorld:
    return lambda: world_in(tmp_path / "store", request.param)


class TestFileStore(StoreConformance):
    pass


# What a file says


def rewritten(path: Path, **changes: object) -> None:
    """Change fields of the header, and seal it again as a writer would."""
    names = ("magic", "version", "length", "namespace", "key", "checksum")
    data = bytearray(path.read_bytes())
    layout = struct.Struct("<8sIQ32s32sI")
    fields = dict(zip(names, layout.unpack_from(data), strict=True)) | changes
    data[: layout.size] = layout.pack(*fields.values())
    struct.pack_into("<I", data, layout.size, zlib.crc32(data[: layout.size]))
    path.write_bytes(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"namespace": bytes(32)},
        {"key": bytes(32)},
        {"magic": b"SOMEBODY"},
        {"version": 2},
        {"length": SMALL - 1},
        {"length": 1 << 62},
        {"checksum": 0},
    ],
    ids=lambda changes: "-".join(f"{key}" for key in changes),
)
def test_a_page_whose_header_says_something_else_is_a_miss_and_goes(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    with world_in(tmp_path) as world:
        prompt = prompt_of(1)
        stored(world, prompt)
        rewritten(world.path(prompt, 2), length=SMALL)
        assert n_prefetched(world, whole(prompt), LAST) == N_PAGES, "the change itself is sound"
        rewritten(world.path(prompt, 2), **changes)
        assert n_prefetched(world, whole(prompt), LAST) == 2
        assert not world.path(prompt, 2).exists()
        assert lookup(world, whole(prompt)) == 2


def test_every_flipped_bit_of_the_header_is_found(tmp_path: Path) -> None:
    with world_in(tmp_path) as world:
        prompt = prompt_of(1)
        stored(world, prompt)
        path = world.path(prompt, 0)
        good = path.read_bytes()
        for offset in range(8 + 4 + 8 + 32 + 32 + 4 + 4):
            path.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
            assert n_prefetched(world, part(prompt, 0), [0]) == 0, f"offset {offset}"
            path.write_bytes(good)
        assert n_prefetched(world, part(prompt, 0), [0]) == 1


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with world_in(tmp_path) as world:
        prompt = prompt_of(1)
        stored(world, prompt)
        os.truncate(world.path(prompt, 0), 1 << 40)
        tracemalloc.start()
        try:
            assert n_prefetched(world, whole(prompt), LAST) == 0
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
        assert not world.path(prompt, 0).exists()


def test_what_is_no_regular_file_is_a_miss_and_stops_nobody(tmp_path: Path) -> None:
    with world_in(tmp_path) as world:
        prompt = prompt_of(1)
        stored(world, prompt)
        elsewhere = tmp_path / "elsewhere"
        os.rename(world.path(prompt, 1), elsewhere)
        os.symlink(elsewhere, world.path(prompt, 1))
        assert n_prefetched(world, whole(prompt), LAST) == 1
        assert elsewhere.exists()
        os.unlink(world.path(prompt, 0))
        os.mkfifo(world.path(prompt, 0))
        assert n_prefetched(world, whole(prompt), LAST) == 0
        assert lookup(world, whole(prompt)) == 0


def test_a_damaged_page_that_cannot_be_removed_is_no_hit_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world_in(tmp_path) as world:
        prompt = prompt_of(1)
        stored(world, prompt)
        world.corrupt(prompt, 3)

        def refuse(path: str) -> None:
            raise OSError(errno.EROFS, "read-only file system", path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", refuse)
            assert n_prefetched(world, whole(prompt), LAST) == 3
            assert lookup(world, whole(prompt)) == 3
        assert persist(world, part(prompt, 3), [3]) == 1
        assert n_prefetched(world, whole(prompt), LAST) == N_PAGES


# Privacy


def test_folders_and_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with world_in(tmp_path / "deep" / "store") as world:
            stored(world, prompt_of(1))
    finally:
        os.umask(before)
    for path in (tmp_path / "deep" / "store").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "deep" / "store").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(StoreRefusedError, match="chmod 700"):
        FileStore(tmp_path, PlainPages(1, SMALL))
    FileStore(tmp_path, PlainPages(1, SMALL), trust_folder=Switch.ON).close(5)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(StoreRefusedError, match="belongs to user 12345"):
        FileStore(tmp_path, PlainPages(1, SMALL))
    os.chown(tmp_path, os.geteuid(), -1)
    with world_in(tmp_path):
        pass
    os.chown(tmp_path / "v1" / "pages", 12345, -1)
    with pytest.raises(StoreRefusedError, match="belongs to user 12345"):
        FileStore(tmp_path, PlainPages(1, SMALL))


def test_a_file_in_the_place_of_the_folder_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(StoreRefusedError, match=r"can't be used|is not a folder"):
            FileStore(folder, PlainPages(1, SMALL))


def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    pages = PlainPages(2, SMALL)
    with pytest.raises(ValueError, match="raise the size"):
        FileStore(tmp_path, pages, size_bytes_max=SMALL)
    with pytest.raises(ValueError, match="at least 1 thread"):
        FileStore(tmp_path, pages, n_threads=0)
    with pytest.raises(ValueError, match="page size of the device"):
        FileStore(tmp_path, pages, PlainPages(2, SMALL + 1))
    store = FileStore(tmp_path, pages)
    with pytest.raises(ValueError, match="without device memory"):
        store.start_persist_device(new_ticket(), part(prompt_of(1), 0), (0,))
    with pytest.raises(ValueError, match="not all in"):
        store.start_prefetch(new_ticket(), part(prompt_of(1), 0), (2,))
    with pytest.raises(ValueError, match="places"):
        store.start_prefetch(new_ticket(), part(prompt_of(1), 0), (0, 1))
    with pytest.raises(ValueError, match="full pages"):
        store.start_lookup(new_ticket(), part(prompt_of(1), N_PAGES))
    assert store.close(5)


# Bounded size


FILE_BYTES = HEADER_BYTES + SMALL


def test_the_store_stays_within_its_size_and_drops_what_was_used_longest_ago(
    tmp_path: Path,
) -> None:
    with world_in(tmp_path, size_bytes_max=20 * FILE_BYTES) as world:
        first, second, third = prompt_of(1), prompt_of(2), prompt_of(3)
        stored(world, first)
        stored(world, second)
        assert n_prefetched(world, whole(first), LAST) == N_PAGES
        stored(world, third)
        assert bytes_under(tmp_path) <= 20 * FILE_BYTES
        assert len(pages_under(tmp_path)) == 20
        assert lookup(world, whole(first)) == N_PAGES
        assert lookup(world, whole(third)) == N_PAGES
        # Children go before their parents: what is left of a prompt is a prefix of it.
        assert n_prefetched(world, whole(second), LAST) == 4
        assert lookup(world, whole(second)) == 4


def test_writing_again_what_is_there_makes_it_young(tmp_path: Path) -> None:
    with world_in(tmp_path, size_bytes_max=2 * N_PAGES * FILE_BYTES) as world:
        stored(world, prompt_of(1))
        stored(world, prompt_of(2))
        stored(world, prompt_of(1))
        stored(world, prompt_of(3))
        world.reopen()
        assert lookup(world, whole(prompt_of(2))) == 0
        assert lookup(world, whole(prompt_of(1))) == N_PAGES


def test_a_child_that_is_written_keeps_its_parents_young(tmp_path: Path) -> None:
    with world_in(tmp_path, size_bytes_max=2 * N_PAGES * FILE_BYTES) as world:
        first = prompt_of(1)
        assert persist(world, part(first, *range(7))) == 7
        stored(world, prompt_of(2))
        assert persist(world, part(first, 7), [7]) == 1
        world.store.close(10)  # The note that the parents were used is taken by then.
        world.store = world.open()
        stored(world, prompt_of(3))
        world.reopen()
        assert lookup(world, whole(prompt_of(2))) == 0
        assert lookup(world, whole(first)) == N_PAGES


def test_a_prompt_larger_than_the_store_ends_short_and_keeps_its_beginning(
    tmp_path: Path,
) -> None:
    with world_in(tmp_path, size_bytes_max=5 * FILE_BYTES) as world:
        prompt = prompt_of(1)
        assert persist(world, whole(prompt)) == 5
        assert lookup(world, whole(prompt)) == 5
        assert bytes_under(tmp_path) == 5 * FILE_BYTES


def test_a_smaller_bound_after_a_restart_is_reached_at_the_next_write(tmp_path: Path) -> None:
    with world_in(tmp_path) as world:
        stored(world, prompt_of(1))
        stored(world, prompt_of(2))
    with world_in(tmp_path, size_bytes_max=9 * FILE_BYTES) as world:
        stored(world, prompt_of(3))
        assert bytes_under(tmp_path) <= 9 * FILE_BYTES


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, None], ids=["empty", "wrong", "gone"])
def test_the_count_of_bytes_is_made_anew_where_it_is_lost(
    tmp_path: Path, content: bytes | None
) -> None:
    with world_in(tmp_path) as world:
        stored(world, prompt_of(1))
    if content is None:
        (tmp_path / "v1" / "usage").unlink()
    else:
        (tmp_path / "v1" / "usage").write_bytes(content)
    with world_in(tmp_path, size_bytes_max=10 * FILE_BYTES) as world:
        stored(world, prompt_of(2))
        assert bytes_under(tmp_path) <= 10 * FILE_BYTES


def account(root: Path) -> int | None:
    with Usage(Folder(root).usage).locked(5) as counter:
        return counter.used_bytes


def test_the_account_says_what_the_folder_holds(tmp_path: Path) -> None:
    with world_in(tmp_path, size_bytes_max=12 * FILE_BYTES) as world:
        for seed in range(5):
            stored(world, prompt_of(seed))
        world.corrupt(prompt_of(4), 0)
        assert n_prefetched(world, whole(prompt_of(4)), LAST) == 0
        assert account(tmp_path) == bytes_under(tmp_path) > 0
        world.store.forget_all()
        assert lookup(world, whole(prompt_of(4))) == 0
        assert account(tmp_path) == bytes_under(tmp_path) == 0


# Weather


def test_a_folder_that_is_gone_is_weather_and_one_that_is_back_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "store"
    with world_in(root) as world:
        prompt = prompt_of(1)
        data = stored(world, prompt)
        os.rename(root, tmp_path / "away")
        with caplog.at_level(logging.WARNING, "kvlift.storage"):
            for _ in range(20):
                assert n_prefetched(world, whole(prompt), LAST) == 0
                assert lookup(world, whole(prompt)) == 0
                assert persist(world, whole(prompt)) == 0
        assert not root.exists(), "a folder that was a mount must not be made on the disk below"
        assert 1 <= len(caplog.records) <= 5, "one line a kind of failure"
        os.rename(tmp_path / "away", root)
        assert n_prefetched(world, whole(prompt), LAST) == N_PAGES
        assert [world.host.content(place) for place in LAST] == data


def test_a_file_in_the_place_of_the_folder_is_weather(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with world_in(root) as world:
        prompt = prompt_of(1)
        stored(world, prompt)
        os.rename(root, tmp_path / "away")
        root.write_text("")
        assert n_prefetched(world, whole(prompt), LAST) == 0
        assert lookup(world, whole(prompt)) == 0
        assert persist(world, whole(prompt)) == 0
        world.store.forget_all()
        root.unlink()
        os.rename(tmp_path / "away", root)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.EMFILE, errno.ENOSPC])
@pytest.mark.parametrize(
    "call", ["open", "preadv", "pwritev", "rename", "lstat", "posix_fallocate"]
)
def test_any_failure_of_any_call_is_a_shorter_run_and_no_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    with world_in(tmp_path) as world:
        old, new = prompt_of(1), prompt_of(2)
        stored(world, old)
        real: Callable[..., object] = getattr(os, call)
        n_calls = 0

        def failing(*args: object, **more: object) -> object:
            nonlocal n_calls
            if threading.current_thread().name.startswith("kvlift-store"):
                n_calls += 1
                if n_calls > 3:
                    raise OSError(code, os.strerror(code))
            return real(*args, **more)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            n_stored = persist(world, whole(new))
            n_read = n_prefetched(world, whole(old), LAST)
            lookup(world, whole(old))
        assert n_calls > 3 or call == "lstat", "the failure struck"
        assert n_stored + n_read < 2 * N_PAGES or call == "lstat"
        for path in files_under(tmp_path):
            if path.suffix == ".tmp":
                path.unlink()  # A failing unlink or open leaves them to the next start.
        assert n_prefetched(world, part(new, *range(n_stored)), LAST[:n_stored]) == n_stored


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """Skips the test where this user may not mount."""
    folder.mkdir(exist_ok=True)
    made = subprocess.run(
        ["mount", *options, str(folder)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"mounting is not allowed here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
@pytest.mark.parametrize("page_bytes", [64 << 10, LARGE])
def test_a_full_disk_ends_a_write_short_and_leaves_no_temporary_file(
    tmp_path: Path, page_bytes: int
) -> None:
    disk = tmp_path / "disk"
    size = f"size={6 * page_bytes}"
    with (
        mounted(disk, "-t", "tmpfs", "-o", size, "tmpfs"),
        world_in(disk / "store", page_bytes) as world,
    ):
        prompt = prompt_of(1)
        data = [world.host.fill(place, place) for place in range(N_PAGES)]
        n_stored = persist(world, whole(prompt))
        assert n_stored == 5, "six fit without headers and folders"
        assert account(disk / "store") == bytes_under(disk / "store")
        assert lookup(world, whole(prompt)) == n_stored
        assert n_prefetched(world, whole(prompt), LAST) == n_stored
        assert [world.host.content(place) for place in LAST[:n_stored]] == data[:n_stored]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount read-only")
def test_a_disk_that_turned_read_only_still_gives_its_pages(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with world_in(root) as world:
        old = prompt_of(1)
        data = stored(world, old)
        with mounted(root, "-o", "bind", str(root)):
            subprocess.run(["mount", "-o", "remount,bind,ro", str(root)], check=True)
            assert persist(world, whole(prompt_of(2))) == 0
            assert n_prefetched(world, whole(old), LAST) == N_PAGES
            assert [world.host.content(place) for place in LAST] == data
            assert lookup(world, whole(old)) == N_PAGES


def test_a_lock_that_somebody_holds_for_ever_stops_writes_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlift.effects.stores.room.LOCK_TIMEOUT_S", 0.1)
    with world_in(tmp_path) as world:
        old = prompt_of(1)
        stored(world, old)
        with Usage(Folder(tmp_path).usage).locked(5):
            assert persist(world, whole(prompt_of(2))) == 0
            assert n_prefetched(world, whole(old), LAST) == N_PAGES
            world.corrupt(old, 0)
            assert n_prefetched(world, whole(old), LAST) == 0
            assert lookup(world, whole(old)) == 0


# Threads


class Gate:
    """Holds reads or writes of the medium until it is opened; knows how many have begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        self.n_begun = 0
        self._open = threading.Event()
        self._changed = threading.Condition()
        real = getattr(FileMedium, call)

        def gated(*args: object, **more: object) -> object:
            with self._changed:
                self.n_begun += 1
                self._changed.notify_all()
            assert self._open.wait(20)
            return real(*args, **more)

        monkeypatch.setattr(FileMedium, call, gated)

    def wait_for(self, n_begun: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.n_begun >= n_begun, 20)

    def open(self) -> None:
        self._open.set()


def test_a_cancelled_read_stops_at_the_next_page_and_ends_when_nothing_is_written_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world_in(tmp_path, n_threads=2) as world:
        prompt, ticket = prompt_of(1), new_ticket()
        stored(world, prompt)
        gate = Gate(monkeypatch, "read")
        world.store.start_prefetch(ticket, whole(prompt), LAST)
        gate.wait_for(2)
        world.store.cancel_prefetch(ticket)
        time.sleep(0.05)
        assert world.store.landed() == [], "pages are still being written"
        gate.open()
        assert world.settle(1)[-1] == PrefetchEnded(ticket, 2)
        assert gate.n_begun == 2


def test_a_read_that_nobody_has_begun_is_cancelled_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world_in(tmp_path, n_threads=1) as world:
        first, second = new_ticket(), new_ticket()
        stored(world, prompt_of(1))
        gate = Gate(monkeypatch, "read")
        world.store.start_prefetch(first, whole(prompt_of(1)), LAST)
        gate.wait_for(1)
        world.store.start_prefetch(second, whole(prompt_of(1)), LAST)
        world.store.cancel_prefetch(second)
        assert world.store.landed() == [PrefetchEnded(second, 0)]
        gate.open()
        assert world.settle(1)[-1] == PrefetchEnded(first, N_PAGES)


def test_pages_of_one_run_are_read_side_by_side_and_counted_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world_in(tmp_path, n_threads=4) as world:
        prompt, ticket = prompt_of(1), new_ticket()
        stored(world, prompt)
        first_key = bytes.fromhex(world.path(prompt, 0).stem)
        let_go, others, real = threading.Event(), threading.Semaphore(0), FileMedium.read

        def first_is_slow(medium: FileMedium, key: bytes, *args: object) -> bool:
            assert key != first_key or let_go.wait(20)
            is_good = real(medium, key, *args)  # type: ignore[arg-type]
            others.release()
            return is_good

        monkeypatch.setattr(FileMedium, "read", first_is_slow)
        world.store.start_prefetch(ticket, whole(prompt), LAST)
        for _ in range(N_PAGES - 1):
            assert others.acquire(timeout=20)
        assert world.store.landed() == [], "no page counts before the first"
        let_go.set()
        assert world.settle(1)[-1] == PrefetchEnded(ticket, N_PAGES)


def test_no_page_is_visible_before_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world_in(tmp_path, n_threads=4) as world:
        prompt, ticket = prompt_of(1), new_ticket()
        keys = [bytes.fromhex(world.path(prompt, position).stem) for position in range(N_PAGES)]
        seen: list[int] = []
        let_go, write, publish = threading.Event(), FileMedium.write_draft, FileMedium.publish_draft

        def slow(medium: FileMedium, draft: file_medium.PageDraft, data: memoryview) -> None:
            assert draft.key != keys[0] or let_go.wait(20)
            write(medium, draft, data)

        def noted(medium: FileMedium, draft: file_medium.PageDraft) -> None:
            seen.append(keys.index(draft.key))
            publish(medium, draft)

        monkeypatch.setattr(FileMedium, "write_draft", slow)
        monkeypatch.setattr(FileMedium, "publish_draft", noted)
        world.store.start_persist(ticket, whole(prompt), tuple(range(N_PAGES)))
        time.sleep(0.1)
        assert pages_under(tmp_path) == set()
        let_go.set()
        assert world.settle(1) == [PersistEnded(ticket, N_PAGES)]
        assert seen == list(range(N_PAGES))


def test_a_page_that_lands_after_all_was_forgotten_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world_in(tmp_path) as world:
        gate, written = Gate(monkeypatch, "publish_draft"), new_ticket()
        world.store.start_persist(written, part(prompt_of(1), 0), [0])
        gate.wait_for(1)
        world.store.forget_all()
        assert lookup(world, whole(prompt_of(1))) == 0, "everything has been forgotten by now"
        gate.open()
        (ended,) = world.settle(1)
        assert ended.ticket == written
        assert lookup(world, whole(prompt_of(1))) == 0
        assert pages_under(tmp_path) == set()


def test_a_lookup_does_not_wait_for_a_long_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world_in(tmp_path, n_threads=1) as world:
        stored(world, prompt_of(1))
        gate = Gate(monkeypatch, "write_draft")
        written, asked = new_ticket(), new_ticket()
        world.store.start_persist(written, whole(prompt_of(2)), tuple(range(N_PAGES)))
        gate.wait_for(1)
        world.store.start_lookup(asked, whole(prompt_of(1)))
        gate.open()
        assert [report.ticket for report in world.settle(2)] == [asked, written]


def test_closing_says_that_a_read_is_stuck_and_the_tick_never_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world_in(tmp_path) as world:
        stored(world, prompt_of(1))
        gate = Gate(monkeypatch, "read")
        begun = time.monotonic()
        world.store.start_prefetch(new_ticket(), whole(prompt_of(1)), LAST)
        gate.wait_for(1)
        world.store.landed()
        assert not world.store.close(0.1)
        assert time.monotonic() - begun < 5
        gate.open()


def test_after_closing_everything_is_a_miss(tmp_path: Path) -> None:
    with world_in(tmp_path) as world:
        prompt = prompt_of(1)
        stored(world, prompt)
        assert world.store.close(5)
        assert lookup(world, whole(prompt)) == 0
        assert n_prefetched(world, whole(prompt), LAST) == 0
        assert persist(world, whole(prompt)) == 0


def test_a_bug_in_a_worker_is_raised_on_the_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world_in(tmp_path) as world:
        monkeypatch.setattr(world.device, "read_page", None)
        world.store.start_persist_device(new_ticket(), part(prompt_of(1), 0), (0,))
        with pytest.raises(TypeError):
            world.settle(1)


# Several processes, restarts, leftovers


def start(*arguments: object) -> "subprocess.Popen[str]":
    script = ROOT / "tests" / "effects" / "store_process.py"
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_two_processes_that_write_the_same_keys_at_once_both_succeed(tmp_path: Path) -> None:
    processes = [start("write", tmp_path, 0, 30, 0) for _ in range(2)]
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert answers == [{"stored": 240, "read": 240, "wrong": 0}] * 2
    assert len(pages_under(tmp_path)) == 240
    assert bytes_under(tmp_path) == account(tmp_path)


def test_a_page_that_two_stores_write_at_the_same_moment_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "write_draft")
    with world_in(tmp_path) as first, world_in(tmp_path) as second:
        for world in (first, second):
            world.store.start_persist(new_ticket(), part(prompt_of(1), 0), [0])
        gate.wait_for(2)
        assert account(tmp_path) == bytes_under(tmp_path) == 2 * FILE_BYTES
        gate.open()
        first.settle(1)
        second.settle(1)
        assert account(tmp_path) == bytes_under(tmp_path) == FILE_BYTES


def test_processes_that_share_a_bounded_store_stay_within_it_together(tmp_path: Path) -> None:
    bound = 40 * (HEADER_BYTES + 8192)
    processes = [start("write", tmp_path, bound, 40, 1000 * number) for number in range(3)]
    most = 0
    while any(process.poll() is None for process in processes):
        try:
            most = max(most, bytes_under(tmp_path))
        except FileNotFoundError:
            continue
        time.sleep(0.001)
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert all(answer["stored"] > 160 and answer["wrong"] == 0 for answer in answers), answers
    assert most > 20 * (HEADER_BYTES + 8192)
    assert bytes_under(tmp_path) <= bound
    assert account(tmp_path) == bytes_under(tmp_path)


def test_what_a_killed_writer_left_is_collected_and_what_a_living_one_writes_is_not(
    tmp_path: Path,
) -> None:
    with world_in(tmp_path):
        pass
    folder = Folder(tmp_path)
    with start("hang", tmp_path) as living, start("hang", tmp_path) as dead:
        for process in (living, dead):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        os.kill(dead.pid, signal.SIGKILL)
        dead.wait()
        found = {file.path: is_orphan(file, time.time_ns()) for file in folder.temporary_files()}
        assert sorted(found.values()) == [False, True]
        store = FileStore(tmp_path, PlainPages(1, SMALL))
        assert store.close(10)
        (left,) = folder.temporary_files()
        assert found[left.path] is False
        os.kill(living.pid, signal.SIGKILL)
        living.wait()
    FileStore(tmp_path, PlainPages(1, SMALL)).close(10)
    assert list(folder.temporary_files()) == []
    assert account(tmp_path) == 0


def test_a_temporary_file_of_another_machine_is_a_leftover_only_when_it_is_old(
    tmp_path: Path,
) -> None:
    with world_in(tmp_path):
        pass
    folder = Folder(tmp_path)
    path = Path(folder.temporary) / f"{'0' * 16}-1-2-00000000-0.tmp"
    path.write_bytes(b"x")
    (file,) = folder.temporary_files()
    assert not is_orphan(file, time.time_ns())
    assert is_orphan(file, time.time_ns() + 3601 * 10**9)
    path.unlink()


@pytest.mark.parametrize("fsync", list(Fsync))
@pytest.mark.parametrize("caching", list(Caching))
def test_every_way_of_writing_gives_the_same_file(
    tmp_path: Path, fsync: Fsync, caching: Caching
) -> None:
    with world_in(tmp_path / "a", LARGE, fsync=fsync, caching=caching) as world:
        stored(world, prompt_of(1))
        file = world.path(prompt_of(1), 0).read_bytes()
    with world_in(tmp_path / "b", LARGE) as world:
        stored(world, prompt_of(1))
        assert world.path(prompt_of(1), 0).read_bytes() == file
    assert len(file) == page_file.HEADER_BYTES + LARGE
