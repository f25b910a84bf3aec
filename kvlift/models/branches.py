"""Which branches of the core a search reaches: what it doesn't reach, it hasn't checked.

Needs the library `coverage` (`pip install kvlift[check]`). Measuring makes the core several times
slower, so it is a pass of its own, in a process of its own, on worlds that fit.
"""

import json
import tempfile
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Final, TypeAlias

from attrs import frozen

_NO_BRANCH: Final = (r"case _:\n\s*assert_never\(", r"^\s*assert_never\(", r"^\s*\.\.\.$")
"""Lines that exist for the type checker: patterns of excluded lines, as `coverage` takes them."""

Branch: TypeAlias = tuple[str, int, int]
"""(file below the folder, line of the decision, line that follows; negative: it returns)"""


@frozen
class Branches:
    """The branches of a folder: those that were taken, and all of them."""

    taken: frozenset[Branch]
    known: frozenset[Branch]

    @property
    def fraction(self) -> float:
        """Taken of known; 1.0 where there is no branch."""
        return len(self.taken) / len(self.known) if self.known else 1.0

    @property
    def missing(self) -> list[Branch]:
        """The branches that nobody took, sorted."""
        return sorted(self.known - self.taken)


def can_measure() -> bool:
    """Whether the library is here."""
    return find_spec("coverage") is not None


def coverage_of(folder: Path, run: Callable[[], object]) -> Branches:
    """The branches of the Python files in `folder` that `run` takes.

    A branch into `assert_never` is no branch: it proves to mypy that there is none. Files that were
    never imported count as well. Raises ImportError without the library `coverage`.
    """
    import coverage

    measured = coverage.Coverage(
        branch=True, source=[str(folder)], data_file=None, config_file=False, messages=False
    )
    measured.set_option("report:exclude_lines", list(_NO_BRANCH))
    with measured.collect():
        run()
    with tempfile.TemporaryDirectory(prefix="kvlift-") as temporary:
        report = Path(temporary) / "branches.json"
        measured.json_report(outfile=str(report))
        files = json.loads(report.read_text())["files"]
    taken: set[Branch] = set()
    missing: set[Branch] = set()
    for name, found in files.items():
        file = Path(name).resolve().relative_to(folder.resolve()).as_posix()
        taken |= {(file, source, target) for source, target in found["executed_branches"]}
        missing |= {(file, source, target) for source, target in found["missing_branches"]}
    return Branches(frozenset(taken), frozenset(taken | missing))


def together(parts: Iterable[Branches]) -> Branches:
    """What several runs took, of what any of them knew."""
    taken: set[Branch] = set()
    known: set[Branch] = set()
    for part in parts:
        taken |= part.taken
        known |= part.known
    return Branches(frozenset(taken), frozenset(known))
