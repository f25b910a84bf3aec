"""The story language: what it reads, and what it says of lines that are wrong."""

from pathlib import Path

import pytest

from kvlift.core.tier import Tier
from kvlift.testing.story_lines import (
    Advance,
    Bound,
    ConfigLine,
    Expect,
    ExpectBallots,
    ExpectBytes,
    ExpectCount,
    ExpectEffects,
    ExpectError,
    ExpectGrow,
    ExpectHit,
    ExpectPromise,
    ExpectSources,
    ExpectState,
    ExpectStore,
    ExpectThat,
    ExpectTier,
    ExpectTold,
    ExpectWants,
    Finish,
    Flush,
    Grow,
    Landing,
    Pages,
    PeerSays,
    Place,
    Port,
    PortsLine,
    PromptLine,
    Restart,
    Scheduler,
    Statement,
    Storage,
    Submit,
    Tick,
    Weather,
    Wedge,
    World,
)
from kvlift.testing.story_parse import parse_story
from kvlift.testing.story_words import StoryError

SHARED = Path(__file__).parents[3] / "shared" / "stories"
PEER4 = Bound("peer", "=", 4)
HEAD = "world ranks=2 page=4 device=16 host=8 storage=9\nprompt A pages=8\n"


def parsed(line: str) -> Statement:
    return parse_story(HEAD + line).lines[-1].statement


@pytest.mark.parametrize(
    ("line", "statement"),
    [
        ("config write=back bypass_max=2", ConfigLine((("write", "back"), ("bypass_max", "2")))),
        ("ports held", PortsLine("held", tuple(Port))),
        ("ports auto writes", PortsLine("auto", (Port.WRITES,))),
        ("prompt B pages=2", PromptLine(name="B", n_pages=2)),
        (
            "prompt B from=A[0:4] pages=10",
            PromptLine(name="B", n_pages=10, begins=Pages("A", 0, 4)),
        ),
        ("prompt B pages=3 tokens=14", PromptLine(name="B", n_pages=3, n_tokens=14)),
        (
            "prompt B like=A tenant=blue salt=c",
            PromptLine(name="B", like="A", namespace=(("tenant", "blue"), ("salt", "c"))),
        ),
        ("put A[0:4] in host", Place("put", Pages("A", 0, 4), Tier.HOST, None)),
        ("put A in device rank=1", Place("put", Pages("A"), Tier.DEVICE, 1)),
        ("lose A[2] from storage", Place("lose", Pages("A", 2, 3), Tier.STORAGE, None)),
        ("corrupt A[2] in storage", Place("corrupt", Pages("A", 2, 3), Tier.STORAGE, None)),
        ("truncate A[:2] in storage", Place("truncate", Pages("A", 0, 2), Tier.STORAGE, None)),
        ("wedge host 3 rank=1", Wedge(Tier.HOST, 3, 1)),
        ("unwedge host", Wedge(Tier.HOST, 0, None)),
        ("submit A priority=9 output=2", Submit("A", 9, 2)),
        ("submit A", Submit("A", 0, 0)),
        ("abort A", Scheduler("abort", "A")),
        ("run A", Scheduler("run", "A")),
        ("retract A", Scheduler("retract", "A")),
        ("resume A", Scheduler("resume", "A")),
        ("grow A 2", Grow("A", 2)),
        ("finish A output=2", Finish("A", 2)),
        ("flush all", Flush((Tier.DEVICE, Tier.HOST, Tier.STORAGE))),
        ("flush host  # now", Flush((Tier.HOST,))),
        ("detach storage", Storage("detach")),
        ("attach storage", Storage("attach")),
        ("restart", Restart()),
        ("tick", Tick(1, None)),
        ("tick 8", Tick(8, None)),
        ("tick rank=1", Tick(1, 1)),
        ("advance 250ms", Advance(250_000_000, None)),
        ("advance 1.5s rank=1", Advance(1_500_000_000, 1)),
        ("land store A pages=2", Landing(verb="land", port=Port.STORE, name="A", n_pages=2)),
        ("land copies A rank=1", Landing(verb="land", port=Port.COPIES, name="A", rank=1)),
        ("land writes", Landing(verb="land", port=Port.WRITES)),
        ("land all rank=0", Landing(verb="land", port=None, rank=0)),
        ("fail writes A", Landing(verb="fail", port=Port.WRITES, name="A")),
        ("again peer A", Landing(verb="again", port=Port.PEER, name="A")),
        ("late store A", Landing(verb="late", port=Port.STORE, name="A")),
        ("silence store", Weather("silence", Port.STORE)),
        ("kill peer", Weather("kill", Port.PEER)),
        ("revive peer", Weather("revive", Port.PEER)),
        ('reject peer A reason="no #1 model"', PeerSays("reject", "A", "no #1 model", None)),
        ("expire peer A", PeerSays("expire", "A", "", None)),
        ("ack peer A", PeerSays("ack", "A", "", None)),
    ],
)
def test_each_kind_of_line_is_read(line: str, statement: Statement) -> None:
    assert parsed(line) == statement


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("A queued|filling", ExpectState("A", ("queued", "filling"), is_negated=False)),
        ("A not ready", ExpectState("A", ("ready",), is_negated=True)),
        ("A sources device=1 peer=4", ExpectSources("A", (Bound("device", "=", 1), PEER4))),
        ("A promise=4", ExpectPromise("A", 4)),
        ("A wants 4:8", ExpectWants("A", frozenset(range(4, 8)))),
        ("A wants nothing", ExpectWants("A", frozenset())),
        ('A error contains "lease has ended"', ExpectError("A", "lease has ended")),
        ("A bytes ok", ExpectBytes("A")),
        ("A hit storage=4", ExpectHit("A", (Bound("storage", "=", 4),))),
        (
            "tier device free>=4 owned<=2",
            ExpectTier(Tier.DEVICE, (Bound("free", ">=", 4), Bound("owned", "<=", 2)), None),
        ),
        ("grow A refused", ExpectGrow("A", "refused")),
        ("count reads A 1", ExpectCount("A", Bound("reads", "=", 1))),
        ("count lookups A <=2", ExpectCount("A", Bound("lookups", "<=", 2))),
        ("store has A[0:4] rank=1", ExpectStore("has", Pages("A", 0, 4), 1)),
        ("store lacks A[3]", ExpectStore("lacks", Pages("A", 3, 4), None)),
        ("effects none", ExpectEffects(())),
        ("effects StartRestore=0", ExpectEffects((Bound("StartRestore", "=", 0),))),
        ("peer told abort A", ExpectTold("abort", "A")),
        ("ballots 1", ExpectBallots(Bound("ballots", "=", 1))),
        ("ranks agree", ExpectThat("agree")),
        ("diverged", ExpectThat("diverged")),
        ("idle", ExpectThat("idle")),
    ],
)
def test_each_expectation_is_read_now_and_within_some_ticks(line: str, expected: object) -> None:
    now, later = parsed(f"expect {line}"), parsed(f"expect within 6 ticks {line}")
    assert isinstance(now, Expect)
    assert isinstance(later, Expect)
    assert (now.expectation, now.within_ticks) == (expected, None)
    assert (later.expectation, later.within_ticks) == (expected, 6)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("sing A", "'sing' is no statement"),
        ("world ranks=1", "once, before anything else"),
        ("prompt A pages=2", "has been said before"),
        ("prompt idle pages=2", "word of the language"),
        ("prompt B", "how long"),
        ("prompt B from=A[1:4] pages=9", "begin with the beginning"),
        ("prompt B like=Z", "no prompt Z"),
        ("submit Z", "no prompt Z"),
        ("put Z[0:2] in storage", "no prompt Z"),
        ("put A[3:1] in storage", "ends before it begins"),
        ("lose A[3] from host", "no tier"),
        ("put A in cellar", "no tier"),
        ("put A in host rank=2", "no rank 2"),
        ("expect store has A rank=2", "no rank 2"),
        ("tick 2 rank=1", "one rank alone"),
        ("tick many", "must be a number"),
        ("tick 99999999", "must be a number"),
        ("advance soon", "no span of time"),
        ("land copies A pages=2", "'pages' is not known"),
        ("land store", "is missing"),
        ("land rope A", "no port"),
        ("reject peer A", "why"),
        ('reject peer A reason="x', "not closed"),
        ("submit A output=1 output=2", "stands twice"),
        ("run A now", "too much"),
        ("run A rank=1", "not known here"),
        ("expect A flying", "no state"),
        ("expect A", "is missing"),
        ("expect tier device", "nothing is counted"),
        ("expect tier device full=1", "not counted here"),
        ("expect effects StartDancing=1", "not counted here"),
        ("expect ballots few", "must be a number"),
        ("expect within A ready", "must be a number"),
        ("config", "at least one"),
    ],
)
def test_a_wrong_line_is_named_with_its_number_and_a_reason(line: str, word: str) -> None:
    with pytest.raises(StoryError, match=word) as found:
        parse_story(HEAD + "\n" + line)
    assert found.value.line == 4


def test_what_is_left_out_of_the_world_has_the_documented_size() -> None:
    story = parse_story("# What it shows,\n# in two lines.\n\nworld ranks=3\n# not this\n")
    assert story.lines[0].statement == World(
        n_ranks=3, page_tokens=4, n_device_pages=64, n_host_pages=64, n_storage_pages=None
    )
    assert story.title == "What it shows, in two lines."


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared stories are not beside this checkout")
def test_every_shared_story_is_in_the_language() -> None:
    stories = [parse_story(path.read_text()) for path in sorted(SHARED.glob("*.story"))]
    assert len(stories) > 50
    assert all(story.title and story.lines for story in stories)
