"""A process of its own with a file store; started by test_files.py.

store_process.py write FOLDER SIZE_BYTES_MAX ROUNDS FIRST_SEED   persists, reads back, prints counts
store_process.py hang FOLDER                                     dies in the middle of a write
"""

import json
import os
import sys
import time
from pathlib import Path

from kvlift.core.landed import Landed, PersistEnded, PrefetchEnded
from kvlift.effects.stores.files import FileStore
from kvlift.effects.stores.folder import Folder
from kvlift.effects.stores.page_file import HEADER_BYTES
from kvlift.effects.stores.room import Room
from tests.effects.store_conformance import LAST, PlainPages, new_ticket, prompt_of, whole

PAGE_BYTES = 8192


def ending(store: FileStore) -> Landed:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for report in store.landed():
            if isinstance(report, PersistEnded | PrefetchEnded):
                return report
        time.sleep(0.0005)
    raise TimeoutError("the store does not answer")


def write(folder: str, size_bytes_max: int, rounds: int, first_seed: int) -> None:
    host = PlainPages(16, PAGE_BYTES)
    store = FileStore(folder, host, size_bytes_max=size_bytes_max or None)
    n_stored = n_read = n_wrong = 0
    for seed in range(first_seed, first_seed + rounds):
        prompt = prompt_of(seed)
        data = [host.fill(place, seed * 10 + place) for place in range(8)]
        store.start_persist(new_ticket(), whole(prompt), tuple(range(8)))
        report = ending(store)
        assert isinstance(report, PersistEnded)
        n_stored += report.n_pages
        store.start_prefetch(new_ticket(), whole(prompt), LAST)
        report = ending(store)
        assert isinstance(report, PrefetchEnded)
        n_read += report.n_pages
        for place in LAST[: report.n_pages]:
            n_wrong += host.content(place) != data[place - LAST[0]]
    assert store.close(10)
    print(json.dumps({"stored": n_stored, "read": n_read, "wrong": n_wrong}))


def hang(folder: str) -> None:
    place = Folder(Path(folder))
    file = Room(place, None).open_temporary(HEADER_BYTES + PAGE_BYTES, time.time_ns(), 0)
    assert file is not None
    os.write(file.descriptor, b"half of a page")
    print("ready", flush=True)
    time.sleep(60)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        hang(sys.argv[2])
