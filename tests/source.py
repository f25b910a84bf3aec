"""The project's own files, as the tests about style and structure see them."""

import ast
from functools import cache
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).resolve().parent.parent


@frozen
class Module:
    """A Python file: its path from the root, its text and its tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def layer(self) -> str:
        """`core` for `kvlift/core/ids.py`; empty for files that belong to no layer."""
        parts = self.path.split("/")
        return parts[1] if parts[0] == "kvlift" and len(parts) > 2 else ""

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


def paths(folder: str, pattern: str = "*") -> list[Path]:
    found = (ROOT / folder).rglob(pattern)
    return sorted(path for path in found if path.is_file() and "__pycache__" not in path.parts)


@cache
def modules(folder: str) -> tuple[Module, ...]:
    """Every Python file under the folder, parsed."""
    parsed = []
    for path in paths(folder, "*.py"):
        text = path.read_text()
        parsed.append(Module(str(path.relative_to(ROOT)), text, ast.parse(text, str(path))))
    return tuple(parsed)


def module_from(text: str, path: str = "kvlift/core/example.py") -> Module:
    return Module(path, text, ast.parse(text))
