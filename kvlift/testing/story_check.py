"""Whether an expectation holds: a sentence that says what was found instead, or None."""

from collections.abc import Container, Mapping, Sequence
from typing import assert_never

from kvlift.core.tier import Tier
from kvlift.testing.sim_operation import Kind
from kvlift.testing.sim_peers import Conversation
from kvlift.testing.sim_rank import SimRank
from kvlift.testing.story_lines import (
    Bound,
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
)
from kvlift.testing.story_prompts import StoryPrompt
from kvlift.testing.story_stage import Stage
from kvlift.testing.story_view import RankView, device_and_host_hit


def shortfall(stage: Stage, expected: Expectation) -> str | None:
    """None when it holds; what was found, otherwise."""
    stage.started()
    match expected:
        case ExpectState():
            return _state(stage, expected)
        case ExpectSources():
            return _sources(stage, expected)
        case ExpectHit():
            return _hit(stage, expected)
        case ExpectPromise():
            return _promise(stage, expected)
        case ExpectWants():
            return _wants(stage, expected)
        case ExpectError():
            return _error(stage, expected)
        case ExpectBytes():
            return _bytes(stage, expected)
        case ExpectTier():
            return _tier(stage, expected)
        case ExpectGrow():
            return _grow(stage, expected)
        case ExpectCount():
            return _count(stage, expected)
        case ExpectStore():
            return _store(stage, expected)
        case ExpectEffects():
            return _effects(stage, expected)
        case ExpectTold():
            return _told(stage, expected)
        case ExpectBallots(bound=bound):
            return None if bound.holds(stage.n_ballots) else f"{stage.n_ballots} ballots"
        case ExpectThat():
            return _that(stage, expected)
        case _:
            assert_never(expected)


def words_of(stage: Stage, name: str, rank: int) -> frozenset[str]:
    """All state words that hold for a request on one rank; empty for one that was never there."""
    request = stage.requests.by_name.get(name)
    if request is None:
        return frozenset()
    live = stage.views[rank].words.get(name)
    if live is not None and (request.outcome is None or live & {"draining"}):
        return live
    if request.outcome is not None:
        return frozenset({request.outcome})
    return frozenset({"queued"})


def _state(stage: Stage, expected: ExpectState) -> str | None:
    found = [words_of(stage, expected.name, rank) for rank in range(len(stage.ranks))]
    for words in found:
        if bool(words & set(expected.words)) == expected.is_negated:
            shown = sorted({"/".join(sorted(one)) or "not submitted" for one in found})
            request = stage.requests.by_name.get(expected.name)
            why = f" ({request.reason})" if request is not None and request.reason else ""
            return " on one rank and ".join(shown) + why
    return None


def _sources(stage: Stage, expected: ExpectSources) -> str | None:
    for view in stage.views:
        request = stage.requests.by_name.get(expected.name)
        last = None if request is None else request.sources
        found = view.sources.get(expected.name, last)
        if found is None:
            return f"{expected.name} has no plan"
        if not _all_hold(expected.bounds, found):
            return _counted(found)
    return None


def _hit(stage: Stage, expected: ExpectHit) -> str | None:
    prompt = stage.prompts.by_name[expected.name]
    ends = [device_and_host_hit(driver, prompt.prompt) for driver in stage.drivers]
    n_device = min(device for device, _host in ends)
    n_above = max(n_device, min(host for _device, host in ends))
    n_stored = 0
    if stage.views[0].is_storage_on:
        n_stored = min(
            _n_leading(rank.store.pages, prompt, n_above, prompt.prompt.n_pages_full)
            for rank in stage.ranks
        )
    found = {"device": n_device, "host": n_above - n_device, "storage": n_stored}
    return None if _all_hold(expected.bounds, found) else _counted(found)


def _promise(stage: Stage, expected: ExpectPromise) -> str | None:
    for talk in _talks(stage, expected.name):
        if talk is None or talk.promise is None:
            return f"the peer has been told no promise for {expected.name}"
        if talk.promise != expected.n_pages:
            return f"promise={talk.promise}"
    return None


def _wants(stage: Stage, expected: ExpectWants) -> str | None:
    for talk in _talks(stage, expected.name):
        found = frozenset() if talk is None else talk.positions()
        if found != expected.pages:
            return f"wants {_ranges(found)}"
    return None


def _error(stage: Stage, expected: ExpectError) -> str | None:
    request = stage.requests.by_name.get(expected.name)
    said = [] if request is None else [request.reason, *request.refusals]
    if any(expected.text in text for text in said):
        return None
    return f"the error {' / '.join(text for text in said if text)!r}"


def _bytes(stage: Stage, expected: ExpectBytes) -> str | None:
    request = stage.requests.by_name.get(expected.name)
    for number, rank in enumerate(stage.ranks):
        if request is None or not request.tables[number]:
            return f"{expected.name} has no pages for the host on rank {number}"
        wrong = request.wrong_pages(number, rank.memory)
        if wrong:
            return f"wrong bytes in pages {wrong} on rank {number}"
    return None


def _tier(stage: Stage, expected: ExpectTier) -> str | None:
    for number, rank in enumerate(stage.ranks):
        if expected.rank is not None and expected.rank != number:
            continue
        found = _tier_counts(stage, expected.tier, number, rank)
        if not _all_hold(expected.bounds, found):
            return f"{_counted(found)} on rank {number}"
    return None


def _tier_counts(stage: Stage, tier: Tier, number: int, rank: SimRank) -> Mapping[str, int]:
    facts = stage.views[number].facts
    match tier:
        case Tier.DEVICE:
            return facts.device.counts
        case Tier.HOST:
            return facts.host.counts
        case Tier.STORAGE:
            store = rank.store
            counts = {"cached": len(store.pages), "owned": store.n_wedged}
            if store.n_pages_max is not None:
                counts["free"] = store.n_pages_max - len(store.pages) - store.n_wedged
            return counts


def _grow(stage: Stage, expected: ExpectGrow) -> str | None:
    request = stage.requests.by_name.get(expected.name)
    found = "not submitted" if request is None else request.grow_outcome
    return None if found == expected.outcome else found


def _count(stage: Stage, expected: ExpectCount) -> str | None:
    kind = Kind.READ if expected.bound.name == "reads" else Kind.LOOKUP
    prompt = stage.prompts.by_name[expected.name]
    for number, dock in enumerate(stage.harbour.docks):
        started = [one for one in dock.rank.store.log if one.kind is kind]
        n_found = len(dock.started_for(started, prompt))
        if not expected.bound.holds(n_found):
            return f"{n_found} {expected.bound.name} on rank {number}"
    return None


def _store(stage: Stage, expected: ExpectStore) -> str | None:
    prompt = stage.prompts.by_name[expected.pages.name]
    for number, rank in enumerate(stage.ranks):
        if expected.rank is not None and expected.rank != number:
            continue
        has = [at for at in prompt.places(expected.pages) if rank.store.has(prompt.value(at))]
        lacks = [at for at in prompt.places(expected.pages) if at not in has]
        wrong = lacks if expected.verb == "has" else has
        if wrong:
            word = "lacks" if expected.verb == "has" else "has"
            return f"the store of rank {number} {word} page {', '.join(map(str, wrong))}"
    return None


def _effects(stage: Stage, expected: ExpectEffects) -> str | None:
    for number, rank in enumerate(stage.ranks):
        names = rank.effects()
        found = {name: names.count(name) for name in names}
        counted = {bound.name: found.get(bound.name, 0) for bound in expected.bounds}
        holds = _all_hold(expected.bounds, counted) if expected.bounds else not found
        if not holds:
            return f"{_counted(found) or 'no effects'} on rank {number}"
    return None


def _told(stage: Stage, expected: ExpectTold) -> str | None:
    for number, rank in enumerate(stage.ranks):
        talks = [talk for talk in rank.peers.log if talk.rid == expected.name]
        told = [
            talk.is_aborted if expected.word == "abort" else talk.is_committed for talk in talks
        ]
        if not any(told):
            return f"rank {number} has not told the peer"
    return None


def _that(stage: Stage, expected: ExpectThat) -> str | None:
    match expected.word:
        case "diverged":
            return None if stage.diverged is not None else "no divergence was reported"
        case "agree":
            return _disagreement(stage)
        case "idle":
            return next(filter(None, map(_business, stage.views)), None)


def _disagreement(stage: Stage) -> str | None:
    if stage.diverged is not None:
        return f"a divergence: {stage.diverged}"
    first = stage.views[0]
    for number, view in enumerate(stage.views):
        if view.words != first.words or view.sources != first.sources:
            return f"rank {number} has {view.words} where rank 0 has {first.words}"
        if view.digest != first.digest:
            return f"rank {number} has another digest than rank 0"
    return None


def _business(view: RankView) -> str | None:
    """What keeps this rank from being idle."""
    if view.words:
        return ", ".join(f"{rid} {'/'.join(sorted(words))}" for rid, words in view.words.items())
    if view.unfinished:
        return view.unfinished
    for tier, facts in ((Tier.DEVICE, view.facts.device), (Tier.HOST, view.facts.host)):
        if facts.counts["free"] + facts.counts["cached"] != facts.capacity:
            return f"{tier.value} {_counted(facts.counts)}"
    return None


def _talks(stage: Stage, name: str) -> list[Conversation | None]:
    """The latest conversation with the peer about a request, by rank."""
    return [
        next((talk for talk in reversed(rank.peers.log) if talk.rid == name), None)
        for rank in stage.ranks
    ]


def _n_leading(stored: Container[object], prompt: StoryPrompt, start: int, stop: int) -> int:
    """How many pages from `start` on are stored, to the first hole."""
    n_pages = 0
    for position in range(start, stop):
        if prompt.value(position) not in stored:
            break
        n_pages += 1
    return n_pages


def _all_hold(bounds: Sequence[Bound], found: Mapping[str, int]) -> bool:
    return all(bound.holds(found.get(bound.name, 0)) for bound in bounds)


def _counted(found: Mapping[str, int]) -> str:
    return " ".join(f"{name}={n}" for name, n in found.items())


def _ranges(pages: frozenset[int]) -> str:
    """`4:8`, `2:4,6:8` or `nothing`."""
    parts: list[list[int]] = []
    for page in sorted(pages):
        if parts and parts[-1][1] == page:
            parts[-1][1] = page + 1
        else:
            parts.append([page, page + 1])
    return ",".join(f"{start}:{stop}" for start, stop in parts) or "nothing"
