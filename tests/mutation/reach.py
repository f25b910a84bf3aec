"""Which lines of the core a test runs, and which lines stand and fall together."""

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import coverage

from tests.mutation.breed import CORE


def lines_run(root: Path, run: Callable[[], object]) -> dict[str, list[int]]:
    """The lines of the core below `root` that run, by file."""
    measuring = coverage.Coverage(
        data_file=None, config_file=False, include=[str(root / CORE / "*.py")], messages=False
    )
    measuring.start()
    try:
        run()
    finally:
        measuring.stop()
    data = measuring.get_data()
    return {
        Path(file).relative_to(root).as_posix(): sorted(data.lines(file) or [])
        for file in data.measured_files()
    }


def statement_lines(file: Path, lines: tuple[int, int]) -> frozenset[int]:
    """All lines of the statements (or heads of statements) that the lines are part of.

    Of a statement over many lines a test may run only some. A change of a default value belongs
    to the head of a function, which no test runs: there it is the whole function."""
    found: set[int] = set()
    for first, last, body in _statements(file):
        if first <= lines[1] and lines[0] <= last:
            found.update(range(first, last + 1))
            if body is not None:
                found.update(range(first, body + 1))
    return frozenset(found)


@cache
def _statements(file: Path) -> tuple[tuple[int, int, int | None], ...]:
    """First line, last line of the head or statement, last line of a function's body."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return tuple(_of(node) for node in ast.walk(tree) if _stands_alone(node))


def _stands_alone(node: ast.AST) -> bool:
    return isinstance(node, ast.stmt | ast.match_case | ast.ExceptHandler)


def _of(node: ast.AST) -> tuple[int, int, int | None]:
    first, last = _first(node), _last(node)
    inner = [_first(block) for block in _blocks(node)]
    if not inner:
        return first, last, None
    is_function = isinstance(node, ast.FunctionDef)
    return first, max(first, min(inner) - 1), last if is_function else None


def _blocks(node: ast.AST) -> Iterator[ast.AST]:
    """The statements and cases directly below."""
    yield from (child for child in ast.iter_child_nodes(node) if _stands_alone(child))


def _first(node: ast.AST) -> int:
    if isinstance(node, ast.match_case):
        return node.pattern.lineno
    assert isinstance(node, ast.stmt | ast.ExceptHandler)
    return node.lineno


def _last(node: ast.AST) -> int:
    if isinstance(node, ast.match_case):
        return _last(node.body[-1])
    assert isinstance(node, ast.stmt | ast.ExceptHandler)
    return node.end_lineno or node.lineno
