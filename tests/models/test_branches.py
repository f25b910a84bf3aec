"""Branch coverage of a folder, on a folder made for it."""

import importlib.util
from pathlib import Path

import pytest

from kvlift.models.branches import Branches, coverage_of, together

pytest.importorskip("coverage")

SOURCE = """
from typing import assert_never

def size(n: int | str) -> str:
    match n:
        case int():
            if n > 9:
                return "large"
            return "small"
        case str():
            return "word"
        case _:
            assert_never(n)
"""


def measured(folder: Path, *values: int | str) -> Branches:
    (folder / "size.py").write_text(SOURCE)
    (folder / "never.py").write_text("def f(n):\n    if n:\n        return 1\n    return 2\n")

    def run() -> None:
        spec = importlib.util.spec_from_file_location("size", folder / "size.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for value in values:
            module.size(value)

    return coverage_of(folder, run)


def test_branches_are_counted_without_those_that_cannot_be(tmp_path: Path) -> None:
    some = measured(tmp_path, 3)
    assert len(some.known) == 4 + 2  # int or not, large or not; and those of the file unused
    assert some.fraction == pytest.approx(2 / 6)
    assert ("size.py", 7, 8) in some.missing
    others = measured(tmp_path, 30, "a")
    all_of_size = together([some, others])
    assert all_of_size.fraction == pytest.approx(4 / 6)
    assert {file for file, _, _ in all_of_size.missing} == {"never.py"}


def test_no_branch_is_full_coverage() -> None:
    assert together([]).fraction == 1.0
