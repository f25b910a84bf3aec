"""The small worlds hold in full; a core that is spoilt on purpose is found out in them."""

from collections.abc import Callable
from typing import Any

import pytest

import kvlift.core.apply
import kvlift.core.settle
import kvlift.core.verdicts
from kvlift.core.agreed import Request
from kvlift.core.deed import HoldBack
from kvlift.core.draft import Draft
from kvlift.models.claim import Trace, as_story
from kvlift.models.explore import Limits, Report, explore
from kvlift.models.memo import forget_memos
from kvlift.models.naive import explore_naive
from kvlift.models.worlds import CALM_SHARE, WORLDS
from kvlift.models.worlds.ghost import TOUCHED
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.restore import calm
from kvlift.models.worlds.situation import Situation

pytestmark = pytest.mark.slow

SMALL = ("back", "calm", "retract", "widen")


def explored(world: Situation) -> Report[Any]:
    return explore(world, Limits(seconds_max=120.0))


def stories(world: Situation, traces: dict[str, Trace[Any] | None]) -> str:
    return "\n".join(as_story(world, t, claim=name) for name, t in traces.items() if t is not None)


@pytest.mark.parametrize("name", SMALL)
def test_a_small_world_holds_in_full(name: str) -> None:
    world = WORLDS[name](deep=False)
    assert isinstance(world, Situation)
    report = explored(world)
    assert report.complete
    broken = {**report.always, **report.live}
    assert not any(broken.values()), stories(world, broken)
    assert [goal for goal, trace in report.sometimes.items() if trace is None] == []


def test_calm_requests_use_the_cache() -> None:
    n_good, n_counted = explored(calm(deep=False)).shares[CALM_SHARE]
    assert n_counted > 0
    assert n_good == n_counted


def test_both_engines_find_the_same_states() -> None:
    fast = explored(calm(deep=False))
    slow = explore_naive(calm(deep=False))
    assert (slow.n_states, slow.n_transitions) == (fast.n_states, fast.n_transitions)
    assert slow.n_moves_to_violation == {}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("deep", [False, True])
def test_every_world_begins_and_goes_on(name: str, *, deep: bool) -> None:
    world = WORLDS[name](deep=deep)
    assert world.name == name
    begun = explore(world, Limits(n_states_max=60))
    assert not any(begun.always.values())
    assert begun.n_states > 30
    if isinstance(world, Situation):
        assert world.story_preamble().startswith("world ")


def test_arrows_that_were_taken_are_named_as_in_the_charts() -> None:
    world = calm(deep=False)
    explored(world)
    assert "request: Waiting --Admitted--> Filling" in set(world.edges_taken())
    assert "mirror: Due --MirrorStarted--> Mirroring" in set(world.edges_taken())


# Spoilt on purpose.


def _frees_at_once(draft: Draft, request: Request, deed: HoldBack) -> None:
    draft.free_device(deed.device)
    draft.free_host(deed.host)


def _spoil(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, by: Callable[..., Any]
) -> None:
    monkeypatch.setattr(module, name, by)
    forget_memos()


def _breaks(name: str) -> dict[str, Trace[Any] | None]:
    world = WORLDS[name](deep=False)
    report = explore(world, Limits(seconds_max=60.0, stops_at_violation=True))
    return {claim: trace for claim, trace in report.always.items() if trace is not None}


def test_pages_that_are_freed_under_a_copy_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    _spoil(monkeypatch, kvlift.core.apply, "_hold_back", _frees_at_once)
    broken = _breaks("widen")
    assert TOUCHED in broken
    trace = broken[TOUCHED]
    assert trace is not None
    assert "abort A" in [move.label for move in trace.moves]


def test_a_request_that_nobody_settles_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    _spoil(monkeypatch, kvlift.core.settle, "_widen", lambda draft, attempt: None)
    assert _breaks("widen")


def test_pages_that_never_come_back_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    _spoil(monkeypatch, kvlift.core.verdicts, "_let_go", lambda draft, ticket: None)
    assert _breaks("widen")


def test_an_output_fills_whole_pages() -> None:
    life = Life(rid="A", prompt=prompt_of(1, 1, 2), story="", n_output_pages=1)
    written = life.prompt.with_tokens(life.output()).n_tokens - 1
    assert written // life.prompt.page_tokens == life.prompt.n_pages_full + 1
