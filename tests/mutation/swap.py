"""Puts a wrong function in the place of the right one, in this process.

Only what a function does is exchanged (its code and its defaults): whoever has imported it goes on
with the wrong one. So a process that has loaded everything can be forked for each mutant.
"""

import ast
import functools
import gc
import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType

from tests.mutation.breed import Mutant


def swap_in(mutant: Mutant, root: Path) -> None:
    """From now on this process has the wrong core.

    Raises ValueError, or TypeError, where that cannot be."""
    module = mutant.file.removesuffix(".py").replace("/", ".")
    path = root / mutant.file
    source = path.read_text(encoding="utf-8")
    if source.count(mutant.original) != 1:
        raise ValueError(f"{mutant.file} has changed since its mutants were made: make them again")
    text = source.replace(mutant.original, mutant.text)
    code = SourceFileLoader(module, str(path)).source_to_code(text.encode(), str(path))
    function = _function(import_module(module), mutant.function)
    function.__code__ = _code_of(code, mutant.function)
    defaults = _defaults(text, mutant.function)
    if defaults is not None:
        function.__defaults__, function.__kwdefaults__ = defaults


def _function(holder: object, name: str) -> FunctionType:
    for part in name.split("."):
        holder = inspect.getattr_static(holder, part)
    if isinstance(holder, staticmethod | classmethod):
        holder = holder.__func__
    if not isinstance(holder, FunctionType):
        raise TypeError(f"{name} is no plain function but {type(holder).__name__}")
    return holder


def _code_of(code: CodeType, name: str) -> CodeType:
    """The code of the function of that qualified name."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    for one in inner:
        if one.co_qualname == name:
            return one
    for one in inner:
        if name.startswith(f"{one.co_qualname}."):
            return _code_of(one, name)
    raise ValueError(f"no function {name} in the changed text")


def _defaults(text: str, name: str) -> tuple[tuple[object, ...], dict[str, object]] | None:
    """The default values of a function where all are plain values; otherwise None."""
    body: list[ast.stmt] = ast.parse(text).body
    *owners, last = name.split(".")
    for owner in owners:
        body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == owner).body
    arguments = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == last).args
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    try:
        return (
            tuple(ast.literal_eval(value) for value in arguments.defaults),
            {one.arg: ast.literal_eval(value) for one, value in pairs if value is not None},
        )
    except ValueError:
        return None


def remembering() -> list[Callable[[], None]]:
    """Empties what was computed by the right core, and is remembered: one call for each memory."""
    kept = [one for one in gc.get_objects() if isinstance(one, functools._lru_cache_wrapper)]
    return [one.cache_clear for one in kept if one.__module__.startswith("kvlift.")]
