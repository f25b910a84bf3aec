"""Wrong cores as mutmut makes them, and what mypy says of each.

mutmut changes one thing in one function. Its own way to run a mutant (all mutants in one file and
a trampoline that chooses) costs a look at the environment a call and takes type guards away from
mypy, so only its changes are used here, under its names.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Final

import libcst
from attrs import evolve, frozen
from mutmut.mutation.file_mutation import create_mutations, deep_replace
from mutmut.mutation.trampoline_templates import mangle_function_name

CORE: Final = "kvlift/core"
CONTROL: Final = "orig"
_COPY = re.compile(r"__mutmut_(\d+|orig)$")
_NUMBER = re.compile(r"\d+")


@frozen(kw_only=True)
class Mutant:
    """One change. `text` stands in `file` in the place of `original`, which occurs there once.

    `lines`: the first and the last line of the file that are different (from 1).
    `function`: its qualified name. `errors`: what mypy says; none where it says nothing."""

    name: str
    file: str
    function: str
    original: str
    text: str
    lines: tuple[int, int]
    errors: tuple[str, ...] = ()

    def diff(self) -> list[str]:
        """The lines that go (-) and the lines that come (+)."""
        pair = self.original.splitlines(), self.text.splitlines()
        return [
            line[0] + " " + line[1:].strip()
            for line in list(unified_diff(*pair, n=0, lineterm=""))[2:]
            if line[0] in "+-"
        ]


def files_of(root: Path) -> list[Path]:
    return sorted((root / CORE).glob("*.py"))


def mutants_of(root: Path, file: Path) -> Iterator[Mutant]:
    """Every change that mutmut knows in a file below `root`."""
    source = file.read_text(encoding="utf-8")
    name = file.relative_to(root).as_posix()
    module, mutations, _, _ = create_mutations(name, source)
    owners = _owners(module)
    n_by_key: dict[str, int] = {}
    originals: dict[str, str] = {}
    for mutation in mutations:
        function = mutation.contained_by_top_level_function
        if not isinstance(function, libcst.FunctionDef):
            continue
        owner = owners[function]
        key = mangle_function_name(name=function.name.value, class_name=owner)
        n_by_key[key] = number = n_by_key.get(key, 0) + 1
        if key not in originals:
            originals[key] = _rendered(function, owner)
        original = originals[key]
        changed = deep_replace(function, mutation.original_node, mutation.mutated_node)
        assert isinstance(changed, libcst.FunctionDef)
        text = _rendered(changed, owner)
        assert source.count(original) == 1, f"{name}: {key} is there twice"
        n_before = source[: source.index(original)].count("\n")
        first, last = _span(original, text)
        yield Mutant(
            name=f"{name.removesuffix('.py').replace('/', '.')}.{key}__mutmut_{number}",
            file=name,
            function=f"{owner}.{function.name.value}" if owner else function.name.value,
            original=original,
            text=text,
            lines=(n_before + first, n_before + last),
        )


def _owners(module: libcst.Module) -> Mapping[libcst.FunctionDef, str | None]:
    """Functions, and the class of each."""
    owners: dict[libcst.FunctionDef, str | None] = {}
    for node in module.body:
        if isinstance(node, libcst.FunctionDef):
            owners[node] = None
        elif isinstance(node, libcst.ClassDef):
            owners.update(
                (method, node.name.value)
                for method in node.body.body
                if isinstance(method, libcst.FunctionDef)
            )
    return owners


def _rendered(function: libcst.FunctionDef, owner: str | None) -> str:
    """The text of a function as it stands in its file, without empty lines before it."""
    if owner is None:
        text = libcst.Module(body=[function]).code
    else:
        inside = libcst.IndentedBlock(body=[function])
        shell = libcst.ClassDef(name=libcst.Name(owner), body=inside)
        text = libcst.Module(body=[shell]).code.partition("\n")[2]
    return str(text).lstrip("\n")


def _span(old: str, new: str) -> tuple[int, int]:
    """The first and last line of `old` that differ from `new`, from 1."""
    a, b = old.splitlines(), new.splitlines()
    n_head = _n_equal(a, b)
    n_tail = _n_equal(a[n_head:][::-1], b[n_head:][::-1])
    return min(n_head + 1, len(a)), max(n_head + 1, len(a) - n_tail)


def _n_equal(a: Sequence[str], b: Sequence[str]) -> int:
    """Lines at the begin of both that are equal."""
    same = (x == y for x, y in zip(a, b, strict=False))
    return next((i for i, equal in enumerate(same) if not equal), min(len(a), len(b)))


def type_checked(root: Path, mutants: Sequence[Mutant], work: Path) -> list[Mutant]:
    """The same mutants with mypy's errors. `work`: a folder for a copy with all of them in it.

    Each mutant stands beside its original under its own name, so that one run of mypy sees all. An
    unchanged copy of each function is the control: what mypy says of it is no fault of a mutant."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(root / "kvlift", work / "kvlift", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", work)
    by_file: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_file.setdefault(mutant.file, []).append(mutant)
    for file, ones in by_file.items():
        (work / file).write_text(_with_copies((root / file).read_text("utf-8"), ones), "utf-8")
    said = _said_by_mypy(work)
    errors: dict[str, list[str]] = {mutant.name: [] for mutant in mutants}
    for file, ones in by_file.items():
        known = {mutant.name.rpartition(".")[2]: mutant.name for mutant in ones}
        found = _by_copy(work / file, said.pop(file, []))
        for copy, messages in found.items():
            control = found.get(copy.partition("__mutmut_")[0] + f"__mutmut_{CONTROL}", [])
            excused = {_NUMBER.sub("", message) for message in control}
            if copy in known:
                errors[known[copy]] += [m for m in messages if _NUMBER.sub("", m) not in excused]
    if said:
        raise RuntimeError(f"mypy complains of files without mutants: {sorted(said)}")
    return [evolve(mutant, errors=tuple(errors[mutant.name])) for mutant in mutants]


def _with_copies(source: str, mutants: Sequence[Mutant]) -> str:
    """The file with every mutant of its functions, and their control, after the original."""
    by_original: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_original.setdefault(mutant.original, []).append(mutant)
    for original, ones in by_original.items():
        key = ones[0].name.rpartition(".")[2].partition("__mutmut_")[0]
        texts = [original, _renamed(original, ones[0].function, f"{key}__mutmut_{CONTROL}")]
        texts += [_renamed(m.text, m.function, m.name.rpartition(".")[2]) for m in ones]
        source = source.replace(original, "\n".join(texts))
    return source


def _renamed(text: str, function: str, name: str) -> str:
    return re.sub(rf"\bdef {function.rpartition('.')[2]}\b", f"def {name}", text, count=1)


def _said_by_mypy(work: Path) -> dict[str, list[tuple[int, str]]]:
    """Errors as (line, message) by file."""
    command = [sys.executable, "-m", "mypy", "--output", "json", "--no-warn-unused-ignores", CORE]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"mypy gave up: {done.stdout[-500:]}{done.stderr[-500:]}")
    said: dict[str, list[tuple[int, str]]] = {}
    for line in filter(str.strip, done.stdout.splitlines()):
        error = json.loads(line)
        if error["severity"] == "error":
            message = f"{error['message']} [{error['code']}]"
            said.setdefault(error["file"], []).append((error["line"], message))
    return said


def _by_copy(file: Path, said: Sequence[tuple[int, str]]) -> dict[str, list[str]]:
    """Messages by the name of the copy that they are about."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    copies = [
        node
        for body in bodies
        for node in body
        if isinstance(node, ast.FunctionDef) and _COPY.search(node.name)
    ]
    found: dict[str, list[str]] = {}
    for line, message in said:
        names = [c.name for c in copies if c.lineno <= line <= (c.end_lineno or c.lineno)]
        if not names:
            raise RuntimeError(f"mypy complains of what no mutant changes: {file}:{line} {message}")
        found.setdefault(names[0], []).append(message)
    return found
