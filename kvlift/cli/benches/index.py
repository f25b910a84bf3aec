"""The prefix index against a memcmp of the same tokens: match, insert, evict, and page keys.

A tree of 200 conversations of 6 rounds over one system prompt (2.2 million tokens), and one prompt
of 65,536 tokens that came in 6 rounds. Every result is checked before it is timed.
"""

import random
from array import array
from collections.abc import Callable

from attrs import frozen

from kvlift.cli.benches.row import Row, median_cpu_us, row
from kvlift.core.ids import DeviceHandle
from kvlift.core.index import Index, device_pages, match
from kvlift.core.index_edit import IndexEdit
from kvlift.core.keys import KEY_BYTES, page_keys
from kvlift.core.policy import EvictionPolicy
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier

N_TOKENS = 65_536
N_CONVERSATIONS = 200
N_ROUNDS = 6
ROUND_TOKENS = 1808
SYSTEM_TOKENS = 1024
NAMESPACE = bytes(KEY_BYTES)


@frozen(kw_only=True)
class Forest:
    """The index, the long prompt, a prompt of which half is new, and all device handles."""

    index: Index
    whole: Prompt
    half_new: Prompt
    n_device: int


def measure(progress: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    for page_tokens in (64, 16):
        progress(f"tree with pages of {page_tokens}")
        rows += _rows(_forest(page_tokens), page_tokens)
    progress("page keys")
    rows.append(_keys_row(_forest(64).whole))
    return rows


def _rows(forest: Forest, page_tokens: int) -> list[Row]:
    index, whole = forest.index, forest.whole
    memcmp_us = _memcmp_us(whole)

    def found() -> tuple[DeviceHandle, ...]:
        return device_pages(index, whole, match(index, whole).device)

    assert len(found()) == whole.n_pages_full
    note = "with page ids; ceiling: memcmp of the tokens"
    match_us = median_cpu_us(found, 200)
    rows = [row(f"match-64k-page{page_tokens}", match_us, "us", memcmp_us, note)]
    if page_tokens == 64:
        insert_us = median_cpu_us(lambda: _insert(forest), 60)
        rows.append(row("insert-64k-half", insert_us, "us", memcmp_us))
        rows.append(_evict_row(forest))
    return rows


def _memcmp_us(prompt: Prompt) -> float:
    other = bytes(bytearray(prompt.tokens))
    return median_cpu_us(lambda: other == prompt.tokens, 400)


def _insert(forest: Forest) -> Index:
    edit = IndexEdit(forest.index)
    prompt = forest.half_new
    edit.extend(prompt, prompt.n_pages_full, now=9999, priority=0)
    n_new = 0
    for segment in list(edit.cover(prompt, 0, prompt.n_pages_full)):
        if segment.device is None:
            first = forest.n_device + n_new
            edit.set_device(
                edit.segments[segment.id],
                tuple(DeviceHandle(first + n) for n in range(segment.n_pages)),
            )
            n_new += segment.n_pages
    assert n_new == prompt.n_pages_full // 2
    return edit.frozen()


def _evict_row(forest: Forest) -> Row:
    n_pages = 1024

    def evict() -> None:
        edit = IndexEdit(forest.index)
        edit.evict(Tier.DEVICE, n_pages, EvictionPolicy.LRU)
        assert len(edit.freed_device) == n_pages

    note = f"{n_pages} pages at a time, exactly as many as asked; ceiling: the target"
    return row("evict-page", median_cpu_us(evict, 40) / n_pages, "us", 1.0, note)


def _keys_row(prompt: Prompt) -> Row:
    def keys() -> list[bytes]:
        return list(page_keys(prompt.namespace, prompt.tokens, prompt.page_tokens))

    assert len(set(keys())) == prompt.n_pages_full
    return row("keys-64k-page64", median_cpu_us(keys, 60), "us", 1400.0, "ceiling: the target")


def _forest(page_tokens: int) -> Forest:
    source = random.Random(1)  # noqa: S311 - tokens of a bench

    def tokens(n_tokens: int) -> bytes:
        return array("i", [source.randrange(128_000) for _ in range(n_tokens)]).tobytes()

    edit = IndexEdit(Index())
    n_device = 0
    system = tokens(SYSTEM_TOKENS)
    now = 0
    for _ in range(N_CONVERSATIONS):
        so_far = system
        for _ in range(N_ROUNDS):
            now += 1
            so_far += tokens(ROUND_TOKENS)
            n_device = _plant(edit, Prompt(NAMESPACE, so_far, page_tokens), n_device, now)
    whole = Prompt(NAMESPACE, tokens(N_TOKENS), page_tokens)
    for number in range(1, N_ROUNDS + 1):
        now += 1
        part = whole.first_tokens(N_TOKENS * number // N_ROUNDS)
        n_device = _plant(edit, part, n_device, now)
    half = whole.first_tokens(N_TOKENS // 2).with_tokens(tokens(N_TOKENS // 2))
    return Forest(index=edit.frozen(), whole=whole, half_new=half, n_device=n_device)


def _plant(edit: IndexEdit, prompt: Prompt, n_device: int, now: int) -> int:
    edit.extend(prompt, prompt.n_pages_full, now=now, priority=0)
    for segment in list(edit.cover(prompt, 0, prompt.n_pages_full)):
        if segment.device is None:
            pages = tuple(DeviceHandle(n_device + n) for n in range(segment.n_pages))
            edit.set_device(edit.segments[segment.id], pages)
            n_device += segment.n_pages
    return n_device
