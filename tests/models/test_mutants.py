"""Every seeded fault fits the core as it is now, and a sample of them is found."""

import re
from datetime import date
from pathlib import Path

import pytest
from attrs import evolve

from benches import check_tables
from kvlift.models.mutants import MUTANTS, Killed, Mutant
from kvlift.models.mutants.document import by_kind
from kvlift.models.mutants.load import code_of, seed
from kvlift.models.mutants.mutant import PatchFailed
from kvlift.models.mutants.run import hunted, run
from kvlift.models.worlds import WORLDS

pytestmark = pytest.mark.slow

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
STORIES = Path(__file__).parents[1] / "stories"
DOCUMENT = Path(__file__).parents[2] / "docs" / "mutants.md"
SAMPLE = (
    "admitted without room for all of it",
    "abort frees pages under a copy",
    "a page asked for while a copy still writes it",
    "a follower is not woken",
    "quarantine ended by a deadline",
    "tickets are used again",
    "deadline decided locally",
    "one token too many in the index",
    "reserve taken by new requests",
    "bypass without bound",
)


def test_there_are_enough_and_none_twice() -> None:
    assert len(MUTANTS) >= 45
    assert len(BY_NAME) == len(MUTANTS)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_its_old_text_occurs_exactly_once_and_the_new_one_is_python(mutant: Mutant) -> None:
    assert mutant.patched() != mutant.path.read_text(encoding="utf-8")
    code_of(mutant)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_where_it_is_expected_exists(mutant: Mutant) -> None:
    assert mutant.expects in WORLDS or (STORIES / mutant.expects).is_file()


@pytest.mark.parametrize("name", SAMPLE)
def test_a_world_or_story_finds_it_out(name: str) -> None:
    found = hunted(BY_NAME[name])
    assert found.killed
    assert found.by is not None
    assert found.by.startswith(f"{BY_NAME[name].expects}: ")
    assert found.steps is not None
    assert 0 < found.steps <= 20


def harmless(name: str) -> Mutant:
    """A change that changes nothing."""
    old = "N_TICKS_MAX: Final = 3\n"
    return Mutant(name=name, file="growth.py", old=old, new=f"{old}\n", why="none", expects="calm")


def test_what_is_not_found_in_time_lives() -> None:
    lives = hunted(harmless("patient"), cpu_s_max=2)
    assert lives == Killed(name="patient", killed=False, by=None, steps=None, cpu_s=2)


def test_all_are_hunted_in_their_order_and_counted() -> None:
    told: list[tuple[int, int]] = []
    chosen = [BY_NAME[name] for name in SAMPLE[:3]]
    found = run(lambda n_done, n_all: told.append((n_done, n_all)), chosen)
    assert [one.name for one in found] == list(SAMPLE[:3])
    assert all(one.killed for one in found)
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("old", ["no such text", "import"])
def test_a_text_that_is_not_there_once_is_refused(old: str) -> None:
    mutant = evolve(harmless("stray"), old=old)
    n_found = mutant.path.read_text(encoding="utf-8").count(old)
    with pytest.raises(PatchFailed, match=f"'stray': its old text occurs {n_found} times"):
        mutant.patched()
    with pytest.raises(RuntimeError, match="its old text occurs"):
        hunted(mutant)


def test_a_process_that_has_the_core_takes_no_fault() -> None:
    with pytest.raises(RuntimeError, match="seed a fault in a new process"):
        seed(harmless("late"))


def test_what_worlds_find_is_told_from_what_stories_find() -> None:
    finders = ["restore: pins are needed", "a-b.story: expected A ready", "walk 3: it raised", None]
    assert by_kind(finders) == "1 by a world, 1 by a story, 1 by a random walk"
    found = [{"killed": by is not None, "by": by, "steps": 2} for by in finders]
    said = check_tables._of_mutants(found)
    assert "3 of 4: 1 by a world, 1 by a story, 1 by a random walk" in said


def test_the_document_has_every_mutant_and_its_killer() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+?) \| [^|]+ \| ([^|]+?) \|", text, re.MULTILINE))
    assert set(BY_NAME) <= set(rows), "write it again: python -m kvlift.models.mutants.document"
    assert not [name for name in BY_NAME if rows[name] == "lives"]
    found = re.search(r"on (\d{4}-\d\d-\d\d)", text)
    assert found is not None
    assert date.fromisoformat(found[1]) <= date.today()  # noqa: DTZ011
