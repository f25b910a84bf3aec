"""The lines that begin with `expect`."""

from typing import Final

from kvlift.testing.story_lines import (
    Bound,
    Expect,
    Expectation,
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
    Statement,
)
from kvlift.testing.story_words import Words

STATES: Final = (
    "queued",
    "admitted",
    "filling",
    "ready",
    "running",
    "retracted",
    "draining",
    "done",
    "aborted",
    "failed",
)
EFFECTS: Final = (
    "StartLookup",
    "StartPrefetch",
    "CancelPrefetch",
    "StartRestore",
    "StartMirror",
    "StartPersist",
    "CancelPersist",
    "SendHold",
    "SendWant",
    "SendCommitted",
    "SendAborted",
    "ClosePeer",
    "ForgetStorage",
)
N_WANTED_MAX: Final = 65_536
"""Pages in one `wants`: each of them is a number in a set."""

TIER_COUNTS: Final = ("free", "cached", "owned", "draining", "reserved")
SOURCES: Final = ("device", "host", "storage", "peer", "recompute")


def parsed_expect(_verb: str, words: Words) -> Statement:
    """`expect ...` and `expect within N ticks ...`."""
    n_ticks = None
    if words.next_is("within"):
        n_ticks = words.number_word("the number of ticks")
        if not words.next_is("tick"):
            words.literal("ticks")
    return Expect(_expectation(words), n_ticks)


def _expectation(words: Words) -> Expectation:
    match words.plain[:1]:
        case ["tier"]:
            return _tier(words)
        case ["grow"]:
            return _grow(words)
        case ["count"]:
            return _count(words)
        case ["store"]:
            return _store(words)
        case ["effects"]:
            return _effects(words)
        case ["peer"]:
            return _told(words)
        case ["ballots"]:
            words.literal("ballots")
            return ExpectBallots(words.count("ballots", "the number of ballots"))
        case ["ranks"]:
            words.literal("ranks")
            words.literal("agree")
            return ExpectThat("agree")
        case ["diverged"]:
            words.literal("diverged")
            return ExpectThat("diverged")
        case ["idle"]:
            words.literal("idle")
            return ExpectThat("idle")
        case _:
            return _of_request(words)


def _of_request(words: Words) -> Expectation:
    name = words.name("what is expected")
    match words.plain[:1]:
        case ["sources"]:
            words.literal("sources")
            return ExpectSources(name, _some(words, SOURCES))
        case ["hit"]:
            words.literal("hit")
            return ExpectHit(name, _some(words, SOURCES[:3]))
        case ["wants"]:
            words.literal("wants")
            return ExpectWants(name, _wanted(words))
        case ["error"]:
            words.literal("error")
            words.literal("contains")
            return ExpectError(name, words.text("the text"))
        case ["bytes"]:
            words.literal("bytes")
            words.literal("ok")
            return ExpectBytes(name)
        case [] if "promise" in words.options:
            return ExpectPromise(name, words.number_option("promise") or 0)
        case _:
            return _state(name, words)


def _state(name: str, words: Words) -> ExpectState:
    is_negated = words.next_is("not")
    alternatives = tuple(words.next_word("what is expected, a state for instance,").split("|"))
    for word in alternatives:
        if word not in STATES:
            words.fail(f"{word!r} is no state; it can be {', '.join(STATES)}")
    return ExpectState(name, alternatives, is_negated)


def _some(words: Words, names: tuple[str, ...]) -> tuple[Bound, ...]:
    bounds = words.bounds(names)
    if not bounds:
        words.fail(f"nothing is counted; give {names[0]}=N or another of {', '.join(names)}")
    return bounds


def _wanted(words: Words) -> frozenset[int]:
    """`4:8`, `2:4,6:8`, or `nothing`."""
    word = words.next_word("the pages that are wanted, such as 4:8")
    if word == "nothing":
        return frozenset()
    pages: set[int] = set()
    n_named = 0
    for part in word.split(","):
        start, colon, stop = part.partition(":")
        first = words.parsed_number(start, "a page")
        last = words.parsed_number(stop, "a page") if colon else first + 1
        if last < first:
            words.fail(f"{part!r} ends before it begins")
        n_named += last - first
        if n_named > N_WANTED_MAX:
            words.fail(f"more than {N_WANTED_MAX} pages are named here")
        pages.update(range(first, last))
    return frozenset(pages)


def _tier(words: Words) -> ExpectTier:
    words.literal("tier")
    tier = words.tier()
    rank = words.rank()
    return ExpectTier(tier, _some(words, TIER_COUNTS), rank)


def _grow(words: Words) -> ExpectGrow:
    words.literal("grow")
    name = words.name()
    outcome = words.next_of("outcome", ("granted", "refused"))
    return ExpectGrow(name, "granted" if outcome == "granted" else "refused")


def _count(words: Words) -> ExpectCount:
    words.literal("count")
    what = words.next_of("thing to count", ("reads", "lookups"))
    return ExpectCount(words.name(), words.count(what, "the number"))


def _store(words: Words) -> ExpectStore:
    words.literal("store")
    verb = words.next_of("verb", ("has", "lacks"))
    return ExpectStore("has" if verb == "has" else "lacks", words.pages(), words.rank())


def _effects(words: Words) -> ExpectEffects:
    words.literal("effects")
    if words.next_is("none"):
        return ExpectEffects(())
    return ExpectEffects(_some(words, EFFECTS))


def _told(words: Words) -> ExpectTold:
    words.literal("peer")
    words.literal("told")
    word = words.next_of("message", ("abort", "committed"))
    return ExpectTold("abort" if word == "abort" else "committed", words.name())
