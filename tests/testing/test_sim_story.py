"""A violation of the simulator as a story: wrong cores fail it, the right one passes it."""

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from kvlift.cli.main import main
from kvlift.core import admission, apply, settle, step_filling
from kvlift.core.ids import Rid
from kvlift.core.index_edit import IndexEdit
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.core.submission import Finish, Submit
from kvlift.testing.sim.cast import CannotBeTold, Cast
from kvlift.testing.sim.plan import Options
from kvlift.testing.sim.retell import checker_of
from kvlift.testing.sim.run import Run, play
from kvlift.testing.sim.scribe import Entry, Scribe
from kvlift.testing.sim.shorten import Shortener
from kvlift.testing.sim.shrink import checker_of as checker_in
from kvlift.testing.sim.shrink import shrunk
from kvlift.testing.sim.story import Told, story_of
from kvlift.testing.story_parse import parse_story
from kvlift.testing.story_run import run_text
from tests.testing.test_simulate import SHORT, STORE, early, failing, freeing

WRONG: list[tuple[object, str, Callable[..., object], tuple[str, ...], int, str]] = [
    (step_filling, "_part_short", failing, STORE, 1, "not failed, found"),
    (apply, "_hold_back", freeing, ("abort", "copy_slow"), 24, "is free while"),
    (admission, "_admit", lambda *_: None, (), 0, "found queued"),
    (IndexEdit, "unpin", lambda *_: None, (), 0, "device pins"),
]


def first_told(options: Options, near: int) -> tuple[str, Told]:
    """The checker that objects, and the story, of the first seed that can be told."""
    for seed in [*range(near, 100), *range(near)]:
        result = play(seed, options)
        if not result.violations:
            continue
        found = shrunk(result, options, seconds_max=3)
        try:
            return checker_in(found.result), story_of(seed, found.options, seconds_max=3)
        except CannotBeTold:
            continue
    pytest.fail("no story of 100 seeds")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "wrong", "faults", "near", "shows"), WRONG, ids=[one[1] for one in WRONG]
)
def test_what_a_wrong_core_does_is_told_as_a_story_that_the_right_one_passes(
    owner: object,
    name: str,
    wrong: Callable[..., object],
    faults: tuple[str, ...],
    near: int,
    shows: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`near`: where to look for a seed first; another is taken where the core has changed."""
    monkeypatch.setattr(owner, name, wrong)
    checker, told = first_told(evolve(SHORT, n_requests_max=20, faults=faults), near)
    assert shows in told.message
    verdict = run_text(told.text, "wrong")
    assert (verdict.exit_code, verdict.message) == (1, told.message)
    parse_story(told.text).title.startswith(checker)
    monkeypatch.undo()
    assert run_text(told.text, "right").exit_code == 0


@pytest.mark.slow
def test_the_command_writes_the_story_and_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(step_filling, "_part_short", failing)
    options = evolve(SHORT, n_requests_max=20, faults=STORE)
    seed = next(seed for seed in range(100) if play(seed, options).violations)
    asked = ["simulate", "--seed", str(seed), "--ticks", "40", "--requests", "20"]
    asked += ["--faults", ",".join(STORE), "--stories", str(tmp_path)]
    assert main(asked) == 1
    [path] = tmp_path.iterdir()
    said = " ".join(capsys.readouterr().out.split())
    assert f"story: kvlift story {path}" in said
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert main(["story", str(path), "--json"]) == 1
    [verdict] = json.loads(capsys.readouterr().out)
    assert "not failed" in verdict["message"]
    monkeypatch.undo()
    assert main(["story", str(path)]) == 0


@pytest.mark.slow
def test_where_no_story_can_be_made_the_command_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A first token never comes before the pages in a story, which this fault needs."""
    monkeypatch.setattr(settle, "_become_ready", early)
    asked = ["simulate", "--seed", "0", "--ticks", "40", "--faults", "none", "--json"]
    assert main([*asked, "--stories", str(tmp_path)]) == 1
    [violation, *_others] = json.loads(capsys.readouterr().out)["violations"]
    assert violation["story"] is None
    assert violation["no_story"].startswith("on a story's stage")
    assert list(tmp_path.iterdir()) == []


def test_a_sound_run_has_no_story() -> None:
    with pytest.raises(CannotBeTold, match="the violation is gone"):
        story_of(3, Options(n_ticks=20, faults=()))


def test_scribes_change_nothing_and_see_the_calls_of_the_host() -> None:
    scribes = [Scribe(), Scribe()]
    options = evolve(SHORT, n_ranks=2)
    assert Run(7, options, scribes).play() == play(7, options)
    submits = [c for e in scribes[0].entries for c in e.calls if isinstance(c, Submit)]
    assert len(submits) == play(7, options).n_requests
    calls = [[entry.calls for entry in scribe.entries] for scribe in scribes]
    assert calls[0] == calls[1]


# The parts.


def entry(tick: int, *calls: Submit | Finish) -> Entry:
    return Entry(tick=tick, now_ns=0, reports=(), calls=calls, room=None)


def submit(rid: str, tokens: list[int], namespace: bytes = bytes(32)) -> Submit:
    return Submit(rid=Rid(rid), prompt=Prompt(namespace, token_bytes(tokens), 2), peer="p")


def test_who_shares_pages_with_whom_is_kept_answers_included() -> None:
    scribe = Scribe()
    scribe.entries = [
        entry(1, submit("a", [1, 2, 3, 4])),
        entry(2, Finish(Rid("a"), token_bytes([5, 6, 7]))),
        entry(3, submit("b", [1, 2, 3, 4, 5, 6, 9]), submit("c", [1, 2, 8])),
        entry(4, submit("d", [1, 2], b"x" * 32), Finish(Rid("d"), token_bytes([1, 1, 1]))),
    ]
    cast = Cast.of(scribe)
    assert cast.lines == [
        "prompt a pages=2 tenant=t0",
        "prompt b from=a[0:3] pages=3 tokens=7 tenant=t0",
        "prompt c from=a[0:1] pages=1 tokens=3 tenant=t0",
        "prompt d-all from=a[0:1] pages=1 tokens=3 tenant=t1",
        "prompt d like=d-all pages=1",
    ]
    parse_story("\n".join(["world page=2", *cast.lines]))


def test_one_name_for_two_prompts_cannot_be_told() -> None:
    scribe = Scribe()
    scribe.entries = [entry(1, submit("a", [1, 2])), entry(2, submit("a", [3]))]
    with pytest.raises(CannotBeTold, match="two different prompts"):
        Cast.of(scribe)


def test_what_a_story_does_not_need_is_taken_out() -> None:
    lines = [
        "world", "prompt A pages=2", "prompt B from=A[0:1] pages=2", "submit A", "submit B",
        "tick", "land store B rank=0", "land store B rank=1", "tick", "tick", "ports auto", "tick",
    ]  # fmt: skip

    def shows(story: object) -> bool:
        assert isinstance(story, list)
        n_ticks = sum(int(x.partition(" ")[2] or 1) for x in story if x.startswith("tick"))
        landed = {"land store B", "land store B rank=1"} & set(story)
        has_prompts = {lines[1], lines[2]} <= set(story)
        return bool(landed) and has_prompts and "submit B" in story and n_ticks >= 4

    assert Shortener(lines, shows, 5).shorten() == [
        "world", "prompt A pages=2", "prompt B from=A[0:1] pages=2", "submit B",
        "tick", "land store B", "tick 2", "ports auto", "tick",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "checker"),
    [
        ("rank 0: host page 3 is free while ticket 4 reads it", "conservation"),
        ("rank 1: pages [2] of A do not hold what their tokens say", "bytes"),
        ("the ranks diverged: ranks differ in 'state' at tick 3", "agreement"),
        ("expected no error of kvlift, found KeyError: 3", "calls"),
        ("expected to run A, found a refusal: run: there is no live request 'A'", None),
    ],
)
def test_a_storys_words_are_those_of_a_checker(message: str, checker: str | None) -> None:
    assert checker_of(message) == checker
