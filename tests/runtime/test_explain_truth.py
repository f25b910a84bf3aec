"""What `explain` says is so: of copies that fail, and of reads and lookups that are given up."""

import pytest

from kvlift.core.prompt import token_bytes
from kvlift.core.tier import Tier
from kvlift.testing.sim_memory import Mode, page_value
from kvlift.testing.sim_operation import Kind
from tests.runtime.journal_world import JournalWorld, prompt_of
from tests.runtime.test_explain import in_storage, texts

MS_NS = 1_000_000


def test_a_copy_that_fails_has_not_landed() -> None:
    world = JournalWorld()
    world.live("A", prompt_of(16))
    world.call("flush", [Tier.DEVICE])
    world.tick()
    copies = world.ranks[0].copies
    copies.restores = Mode.HELD
    world.submit("B", prompt_of(16))
    world.tick(4)
    [copy] = copies.running()
    copies.fail(copy)
    world.tick(8)
    told = texts(world, "B")
    assert "a restore has ended on all ranks" in told
    assert [text for text in told if "landed on all" in text] == []


def test_a_store_that_says_nothing_is_not_said_to_be_known() -> None:
    world = JournalWorld(fields={"prefetch_deadline_ms": 20})
    world.ranks[0].store.is_silent = True
    world.submit("A", prompt_of(16))
    world.tick(60)
    told = texts(world, "A")
    assert "storage is asked no more: some rank has found nothing, or waited too long" in told
    assert [text for text in told if "all ranks know" in text] == []


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("late", "it took too long on some rank"),
        ("detached", "storage is detached"),
        ("best_effort", "everything else is here"),
    ],
)
def test_why_a_read_is_given_up_is_what_happened(how: str, why: str) -> None:
    fields: dict[str, object] = {"prefetch_stall_ms": 20} if how == "late" else {}
    policy = "best_effort" if how == "best_effort" else "wait_complete"
    world = JournalWorld(n_ranks=2, fields={"prefetch": policy, **fields})
    in_storage(world, 16)
    for rank in world.ranks:
        rank.store.reads = Mode.HELD
    world.submit("B", prompt_of(24))
    world.tick(3)
    assert [one.is_outstanding for one in world.ranks[0].store.log if one.kind is Kind.READ] == [
        True
    ]
    if how == "detached":
        world.call("detach_storage")
    world.tick(80)
    told = texts(world, "B")
    assert f"the read from storage is given up: {why}" in told
    reason = f"the read from storage was given up: {why}"
    assert f"the cached prefix ends at page 0 now: {reason}" in told


def test_lookups_that_a_detach_ends_are_not_answered() -> None:
    world = JournalWorld()
    world.ranks[0].store.is_silent = True
    world.submit("A", prompt_of(16))
    world.tick(2)
    world.call("detach_storage")
    world.tick(6)
    told = texts(world, "A")
    assert "storage is asked no more" in told
    assert [text for text in told if "all ranks know" in text] == []


def test_why_pages_stay_in_storage_is_said() -> None:
    world = JournalWorld(fields={"cost_model": "on", "host_pages": 32})
    in_storage(world, 32)
    store = world.ranks[0].store
    store.reads = Mode.HELD
    world.submit("B", prompt_of(36))
    world.tick(4)
    world.ranks[0].clock.advance(500 * MS_NS)
    for one in [one for one in store.log if one.is_outstanding]:
        store.land(one)
    world.tick(6)
    world.call("run", "B")
    world.tick()
    world.call("finish", "B", token_bytes([1]))
    world.tick(8)
    world.call("flush", [Tier.DEVICE, Tier.HOST])
    world.tick()
    world.live("C", prompt_of(36))
    [text] = [text for text in texts(world, "C") if "stay in storage" in text]
    assert text.startswith("pages 0 to 8 stay in storage: by what was measured they come sooner")
    assert [text for text in texts(world, "B") if "stay in storage" in text] == []


def test_pages_that_are_too_few_or_have_no_room_on_the_host_are_told_apart() -> None:
    few = JournalWorld(fields={"prefetch_min_pages": 3})
    in_storage(few, 8)
    few.live("B", prompt_of(24))
    assert "pages 0 to 1 stay in storage: fewer than 3 pages are not worth a read" in texts(
        few, "B"
    )
    narrow = JournalWorld(fields={"host_pages": 2})
    in_storage(narrow, 16)
    for position in range(4):
        narrow.ranks[0].store.put(page_value(prompt_of(16), position))
    narrow.live("B", prompt_of(24))
    assert "pages 2 to 3 stay in storage: the host has no room for them" in texts(narrow, "B")
