"""`docs/checking.md` names claims, tests and commands that exist, and all of the study's list."""

import re
from pathlib import Path

from kvlift.models.explore import NOTHING_RAISED
from kvlift.models.worlds import WORLDS

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "checking.md"
_ROW = re.compile(r"^\| (\d+) \| (?P<what>[^|]+) \| (?P<by>[^|]+) \|$", re.MULTILINE)


def rows() -> dict[int, str]:
    """By number: what holds each invariant."""
    text = DOCUMENT.read_text(encoding="utf-8")
    section = text.partition("## The study's 56 invariants")[2].partition("\n## ")[0]
    return {int(row[1]): row["by"] for row in _ROW.finditer(section)}


def claims() -> set[str]:
    built = [factory(deep=False) for factory in WORLDS.values()]
    return {NOTHING_RAISED, *(claim.name for world in built for claim in world.claims())}


def test_every_invariant_of_the_study_has_its_line() -> None:
    assert list(rows()) == list(range(1, 57))


def test_what_holds_an_invariant_exists() -> None:
    known = claims()
    for number, by in rows().items():
        named = re.findall(r"`([^`]+)`", by)
        assert named or "**not held**" in by, f"{number}: nothing is named"
        for name in named:
            is_there = name in known or name.startswith("kvlift ") or (ROOT / name).exists()
            assert is_there, f"{number}: {name!r} is neither a claim of a world nor a test"


def test_every_invariant_of_the_study_is_held_or_replaced() -> None:
    assert [number for number, by in rows().items() if "not held" in by] == []
