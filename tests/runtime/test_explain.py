"""One request's life in plain words: what an engineer wants to know is said, and nothing secret."""

from kvlift.core.edges import EDGES
from kvlift.core.prompt import token_bytes
from kvlift.core.tier import Tier
from kvlift.runtime.explain import explain
from kvlift.runtime.explain_words import ARROWS, WHY_SHRUNK, span
from kvlift.testing.sim_memory import Mode
from kvlift.testing.sim_operation import Kind
from tests.runtime.journal_world import JournalWorld, prompt_of


def texts(world: JournalWorld, rid: str, rank: int = 0) -> list[str]:
    return [one.text for one in explain(world.journal(rank), rid)]


def in_storage(world: JournalWorld, n_tokens: int) -> None:
    world.live("first", prompt_of(n_tokens))
    world.call("flush", [Tier.DEVICE, Tier.HOST])
    world.tick()


def test_a_life_from_submission_to_its_end_is_told_in_order() -> None:
    world = JournalWorld(n_ranks=2)
    in_storage(world, 16)
    world.live("B", prompt_of(24))
    told = texts(world, "B", rank=1)
    plan = "pages 0 to 3 from storage, pages 4 to 5 from the prefill node"
    expected = [
        "submitted: 24 tokens in 6 pages of 4; prefill node p; in the cache: 0 pages on the device",
        "storage is asked for pages 0 to 5",
        "on this rank: storage has 4 of 6 pages",
        "all ranks know what storage has: 4 of 6 pages",
        f"admitted: {plan}; the prefill node was promised that it need not send the first 4 pages",
        "the prefill node is asked for pages 4 to 5",
        "on this rank: the read from storage has ended, 4 of 4 pages are good",
        "on this rank: the restore has ended, 4 pages landed",
        "everything is in place on all ranks",
        f"ready: {plan}",
        "the host calls run",
        "the host calls finish",
        "ended: done",
    ]
    at = [told.index(text) for text in expected]
    assert at == sorted(at)


def test_the_pieces_of_a_restore_are_told_while_the_read_goes_on() -> None:
    world = JournalWorld()
    in_storage(world, 16)
    store, copies = world.ranks[0].store, world.ranks[0].copies
    store.reads = Mode.HELD
    world.submit("B", prompt_of(24))
    world.tick(6)
    [read] = [one for one in store.log if one.kind is Kind.READ and one.is_outstanding]
    store.progress(read, 1)
    world.tick(2)
    assert [len(copy.targets) for copy in copies.log if copy.kind is Kind.RESTORE] == [1]
    store.land(read, 4)
    world.tick(4)
    assert [len(copy.targets) for copy in copies.log if copy.kind is Kind.RESTORE] == [1, 3]
    assert world.states["B"] == "ready"
    told = texts(world, "B", rank=0)
    expected = [
        "on this rank: 1 of 4 pages have been read from storage",
        "on this rank: a copy to the device has ended, 1 of 4 pages landed",
        "on this rank: the read from storage has ended, 4 of 4 pages are good",
        "on this rank: the restore has ended, 4 pages landed",
    ]
    at = [told.index(text) for text in expected]
    assert at == sorted(at)


def test_times_and_attempts_are_those_of_the_rank() -> None:
    world = JournalWorld()
    world.live("A", prompt_of(8))
    world.live("A", prompt_of(8))
    told = explain(world.journal(), "A")
    assert [one.tick for one in told] == sorted(one.tick for one in told)
    assert [one.ms for one in told] == sorted(one.ms for one in told)
    assert {one.attempt for one in told} == {1, 2}
    assert told[0].ms == 0.0
    assert told[-1].ms > 5.0


def test_what_is_on_the_device_and_the_host_is_said() -> None:
    world = JournalWorld()
    world.live("A", prompt_of(16))
    world.call("flush", [Tier.DEVICE])
    world.tick()
    world.live("B", prompt_of(24))
    world.live("C", prompt_of(24))
    assert "0 pages on the device, then up to page 3 on the host" in texts(world, "B")[0]
    assert "in the cache: 6 pages on the device" in texts(world, "C")[0]


def test_why_a_prefix_shrank_is_said() -> None:
    world = JournalWorld()
    in_storage(world, 16)
    rank = world.ranks[0]
    rank.store.reads = Mode.HELD
    world.submit("B", prompt_of(24))
    world.tick(4)
    (read,) = [o for o in rank.store.log if o.is_outstanding and o.kind is Kind.READ]
    rank.store.land(read, 1)
    world.tick(8)
    told = texts(world, "B")
    assert (
        "the cached prefix ends at page 1 now: a page was missing or damaged in storage on some"
        " rank" in told
    )
    assert "the prefill node is asked for pages 1 to 3" in told
    assert "ready: page 0 from storage, pages 1 to 5 from the prefill node" in told


def test_why_a_request_waits_for_room_is_said_once() -> None:
    world = JournalWorld(fields={"device_pages": 6})
    world.submit("A", prompt_of(16))
    world.tick(8)
    world.submit("B", prompt_of(16, 1000))
    world.tick(10)
    waits = [text for text in texts(world, "B") if text.startswith("waits for room")]
    assert waits == [
        "waits for room: it needs 4 pages of the device; 2 are free and 0 cached ones are unused"
    ]
    world.submit("C", prompt_of(16, 2000))
    world.tick(6)
    (behind,) = [text for text in texts(world, "C") if text.startswith("waits for room")]
    assert "ahead in the line: B" in behind


def test_a_refusal_of_the_prefill_node_is_told_in_its_words() -> None:
    world = JournalWorld()
    world.node.refuse("A", "the model\nis another", [])
    world.submit("A", prompt_of(16))
    world.tick(8)
    told = texts(world, "A")
    assert any("the model\\nis another" in text for text in told)
    assert "ended: failed, prefill node p refused the request" in told


def test_growth_retraction_and_return_are_told() -> None:
    world = JournalWorld()
    world.submit("A", prompt_of(18))
    world.tick(8)
    world.call("run", "A")
    world.tick()
    world.call("grow", "A", 2)
    world.call("retract", "A", token_bytes([1, 2, 3]))
    world.tick(4)
    world.call("resume", "A")
    world.tick(8)
    told = texts(world, "A")
    assert "asks for 2 pages more: granted" in told
    assert "retracted: its full pages stay in the cache" in told
    assert "is wanted back" in told
    assert any(text.startswith("ready: ") for text in told[told.index("is wanted back") :])


def test_a_request_that_another_one_leads_is_told_so() -> None:
    world = JournalWorld()
    world.node.mode = Mode.HELD
    world.submit("A", prompt_of(16))
    world.tick(4)
    world.submit("B", prompt_of(20))
    world.tick(4)
    assert any("pages 0 to 3 from another request" in text for text in texts(world, "B"))


def test_an_unknown_request_has_no_life() -> None:
    world = JournalWorld()
    world.live("A", prompt_of(8))
    assert explain(world.journal(), "Z") == []


def test_neither_tokens_nor_the_first_token_are_told() -> None:
    world = JournalWorld()
    world.node.first_token = lambda _rid, _prompt: (77_777_777, -0.5)
    world.live("A", prompt_of(16, 55_555_000))
    told = " ".join(texts(world, "A"))
    assert "77777777" not in told
    assert "55555" not in told


def test_a_journal_that_was_changed_is_told_up_to_the_change() -> None:
    world = JournalWorld()
    world.live("A", prompt_of(16))
    lines = world.journal()
    at = next(n for n, line in enumerate(lines) if b"BecameReady" in line)
    lines[at] = lines[at].replace(b"BecameReady", b"WasRetracted")
    told = explain(lines, "A")
    assert "can't be followed further" in told[-1].text
    assert not any(one.text.startswith("ready") for one in told)


def test_every_word_is_about_an_event_that_exists() -> None:
    events = {event.__name__ for _phase, event, _after in EDGES}
    assert set(ARROWS) <= events
    assert set(WHY_SHRUNK) <= events


def test_pages_are_named_as_people_do() -> None:
    assert (span(3, 1), span(3, 2)) == ("page 3", "pages 3 to 4")
