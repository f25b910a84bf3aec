"""`python -m tests.mutation`: the mutation score of the core. docs/mutation.md says what it means.

Everything that was found out stays in `out/mutation`: a run that was ended goes on where it was,
and a mutant of a function that has not changed is not made, checked or hunted again.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import pytest
from attrs import define, evolve, field

import kvlift.core
from tests.mutation.breed import Mutant, files_of, mutants_of, type_checked
from tests.mutation.explained import written
from tests.mutation.hunt import Fate, Hunt, Reach
from tests.mutation.report import ALIVE, alive_of, listed, result_of, write

ROOT: Final = Path(__file__).resolve().parents[2]
TESTS: Final = ("tests/core", "tests/testing/test_stories.py", "tests/mutation/suite.py")
DOCUMENT: Final = ROOT / "docs" / "mutation.md"
QUIET: Final = (
    *("-q", "-s", "--tb=no", "--assert=plain", "-m", "not real and not gpu"),
    *("-p", "no:cacheprovider", "-p", "no:logging", "-p", "no:xdist", "-o", "timeout=0"),
)


@define
class Book:
    """What is known so far, in one folder."""

    folder: Path
    mutants: list[Mutant] = field(factory=list)
    fates: dict[str, Fate] = field(factory=dict)
    reach: dict[str, Reach] = field(factory=dict)
    digests: dict[str, str] = field(factory=dict)

    def load(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.mutants = self._read("mutants", list[Mutant]) or []
        self.fates = self._read("fates", dict[str, Fate]) or {}
        self.digests = self._read("digests", dict[str, str]) or {}
        if self._read("sources", str) == digest_of_sources():
            self.reach = self._read("reach", dict[str, Reach]) or {}

    def _read(self, name: str, kind: Any) -> Any:
        file = self.folder / f"{name}.json"
        return msgspec.json.decode(file.read_bytes(), type=kind) if file.exists() else None

    def save(self, name: str) -> None:
        self._write(name, getattr(self, name))

    def _write(self, name: str, value: object) -> None:
        write(self.folder / f"{name}.json", msgspec.json.encode(value).decode())

    def save_reach(self) -> None:
        """It is what tests run, so it is known for as long as nothing has changed."""
        self.save("reach")
        self._write("sources", digest_of_sources())

    def make(self) -> None:
        """The mutants of the core as it is now. What is known of an equal change stays known."""
        before = {(m.file, m.original, m.text): m for m in self.mutants}
        made = self._made()
        known = [m for m in made if (m.file, m.original, m.text) in before]
        unknown = [m for m in made if (m.file, m.original, m.text) not in before]
        if unknown:
            click.echo(f"{len(unknown)} new mutants go to mypy")
            unknown = type_checked(ROOT, unknown, self.folder / "typed")
        fates = {}
        for at, mutant in enumerate(known):
            old = before[mutant.file, mutant.original, mutant.text]
            known[at] = evolve(mutant, errors=old.errors)
            if old.name in self.fates:
                fates[mutant.name] = self.fates[old.name]
        self.mutants = sorted([*known, *unknown], key=lambda m: (m.file, m.lines, m.name))
        self.fates = fates
        self.save("mutants")
        self.save("fates")
        self.save("digests")

    def _made(self) -> list[Mutant]:
        """All mutants; those of a file that has not changed are not made again."""
        digests = {}
        made: list[Mutant] = []
        for file in files_of(ROOT):
            name = file.relative_to(ROOT).as_posix()
            digests[name] = hashlib.sha256(file.read_bytes()).hexdigest()
            if self.digests.get(name) == digests[name]:
                made += [mutant for mutant in self.mutants if mutant.file == name]
            else:
                made += mutants_of(ROOT, file)
        self.digests = digests
        return made


def digest_of_sources() -> str:
    """Of all that a test may run."""
    files = [f for name in ("kvlift", "tests") for f in (ROOT / name).rglob("*.*")]
    hasher = hashlib.sha256()
    for file in sorted(files):
        if file.suffix in (".py", ".story"):
            hasher.update(file.read_bytes())
    return hasher.hexdigest()


def chosen(book: Book, *, only: str, again: str, sample: int | None) -> list[Mutant]:
    """The mutants to hunt, in an order that has nothing to do with the code: any part of it is a
    fair sample."""
    right = [m for m in book.mutants if not m.errors and only in m.name]
    right.sort(key=lambda m: hashlib.sha256(m.name.encode()).digest())
    right = right[:sample]
    if again == "all":
        return right
    if again == "alive":
        return [m for m in right if m.name not in book.fates or book.fates[m.name].how in ALIVE]
    return [m for m in right if m.name not in book.fates]


def hunted(book: Book) -> dict[str, Fate]:
    """The fates that are a fair sample: all mutants up to the first that was not hunted."""
    order = chosen(book, only="", again="all", sample=None)
    known = takewhile(lambda mutant: mutant.name in book.fates, order)
    return {mutant.name: book.fates[mutant.name] for mutant in known}


@click.command()
@click.option("--out", default=ROOT / "out" / "mutation", type=click.Path(path_type=Path))
@click.option("--result", type=click.Path(path_type=Path), help="Write the counts to this file.")
@click.option("--jobs", default=1, type=click.IntRange(1, 64), help="Mutants at a time.")
@click.option("--seconds", default=15.0, help="Tests that take longer alone are left out.")
@click.option("--cap", default=1e9, help="Seconds of tests a mutant, as they take alone.")
@click.option("--only", default="", help="Mutants that have this in their name.")
@click.option("--sample", type=click.IntRange(1), help="As many, chosen by hash of their name.")
@click.option("--again", default="none", type=click.Choice(["none", "alive", "all"]))
@click.option("--document", is_flag=True, help="Write who lives, and why, into docs/mutation.md.")
@click.option("--list", "lists", is_flag=True, help="Say who lives, by what is known; run nothing.")
def main(**said: Any) -> None:
    """Make every mutant of kvlift/core, let mypy and then the tests find it."""
    os.chdir(ROOT)
    if ROOT not in Path(next(iter(kvlift.core.__path__))).parents:
        raise click.ClickException(f"kvlift is not that of {ROOT}: set PYTHONPATH={ROOT}")
    book = Book(said["out"])
    book.load()
    if said["lists"]:
        click.echo(listed(book.mutants, book.fates))
        return
    if said["document"]:
        text = written(DOCUMENT.read_text("utf-8"), alive_of(book.mutants, book.fates))
        write(DOCUMENT, text)
        return
    book.make()
    mutants = chosen(book, only=said["only"], again=said["again"], sample=said["sample"])
    click.echo(f"{len(book.mutants)} mutants, {len(mutants)} to hunt")
    code = _hunt(book, mutants, said)
    if said["result"] is not None:
        command = f"python -m tests.mutation {' '.join(sys.argv[1:])}"
        found = result_of(book.mutants, hunted(book), command=command, n_tests=len(book.reach))
        write(said["result"], json.dumps(found, indent=1) + "\n")
    sys.exit(code)


def _hunt(book: Book, mutants: Sequence[Mutant], said: Mapping[str, Any]) -> int:
    began_s = time.monotonic()
    n_done = 0

    def on_measured() -> None:
        book.save_reach()
        for name, why in hunt.left_out.items():
            click.echo(f"left out: {name}: {why}")
        cpu_s = sum(test.cpu_s for test in book.reach.values())
        click.echo(f"{len(book.reach)} tests, {cpu_s:.0f} s alone under coverage")

    def on_fate(mutant: Mutant, fate: Fate) -> None:
        nonlocal n_done
        n_done += 1
        book.fates[mutant.name] = fate
        if fate.how in ALIVE:
            click.echo(f"{fate.how} ({fate.n_tests} tests, {fate.cpu_s:.1f} s) {mutant.name}")
        if n_done % 10 == 0:
            click.echo(f"{n_done} of {len(mutants)}, {time.monotonic() - began_s:.0f} s")
            book.save("fates")

    hunt = Hunt(
        ROOT,
        mutants,
        said["jobs"],
        said["seconds"],
        said["cap"],
        on_measured,
        on_fate,
        tests=book.reach,
    )
    code = pytest.main([*TESTS, *QUIET, "--hypothesis-seed=0"], plugins=[hunt])
    book.save("fates")
    return int(code)


if __name__ == "__main__":
    main()
