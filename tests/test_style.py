"""The style guide as a test. Every message says its reason; a rule without one is no rule."""

import ast
import re
import tokenize
from collections.abc import Iterator
from io import StringIO
from typing import TypeAlias

import pytest

from tests.source import ROOT, Module, module_from, modules, paths

FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 400

Found: TypeAlias = Iterator[str]


def function_length(module: Module) -> Found:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            n_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if n_lines >= FUNCTION_LINES_MAX:
                yield (
                    f"{module.path}:{node.lineno}: {node.name} has {n_lines} lines, the limit is"
                    f" below {FUNCTION_LINES_MAX}: a reader keeps no more in mind"
                )


def file_length(module: Module) -> Found:
    if len(module.lines) >= FILE_LINES_MAX:
        yield (
            f"{module.path}: {len(module.lines)} lines, the limit is below {FILE_LINES_MAX}:"
            " one file, one idea"
        )


BANNED_CALLS = {
    "eval": "it runs what it is given",
    "exec": "it runs what it is given",
    "compile": "it exists to be run",
    "__import__": "importlib says what it does",
    "breakpoint": "it is a debugging leftover",
}
BANNED_MODULES = {
    "pickle": "loading it runs code of who wrote it",
    "marshal": "it trusts its input",
    "shelve": "it is pickle",
    "cloudpickle": "it is pickle",
    "dill": "it is pickle",
}
BANNED_ATTRIBUTES = {
    ("torch", "load"): "it may unpickle; use safetensors",
    ("torch", "save"): "it pickles; use safetensors",
    ("os", "system"): "it goes through a shell; use subprocess with a list",
}


def banned_calls(module: Module) -> Found:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            reason = BANNED_CALLS.get(node.func.id)
            if reason:
                yield f"{module.path}:{node.lineno}: {node.func.id}() is banned: {reason}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            reason = BANNED_ATTRIBUTES.get((node.value.id, node.attr))
            if reason:
                yield f"{module.path}:{node.lineno}: {node.attr} is banned: {reason}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                reason = BANNED_MODULES.get(name.partition(".")[0])
                if reason:
                    yield f"{module.path}:{node.lineno}: {name} is banned: {reason}"


UNFINISHED = re.compile(
    r"\b(TODO|FIXME|XXX|HACK|WIP|(?i:for now|placeholders?|stubs?|stubbed)|NotImplementedError)\b"
)
"""Reminders in capitals only: `todo` is a fair name for a list of work."""


def unfinished(module: Module) -> Found:
    for number, line in enumerate(module.lines, 1):
        for match in UNFINISHED.finditer(line):
            yield (
                f"{module.path}:{number}: {match[0]!r}: what is in the repository is finished;"
                " what is not belongs in an issue"
            )


BANNED_NAME = re.compile(r"^_*(get|do|handle|process|maybe)_")
BANNED_FILE = re.compile(r"(^|_)(manager|managers|util|utils|helper|helpers|common|misc)$")
BANNED_CLASS = re.compile(r"(Manager|Mixin|Util|Utils|Helper)$")
OTHERS_NAMES = {"get_command"}
"""Methods whose name a library has chosen."""


def banned_names(module: Module) -> Found:
    stem = module.path.rpartition("/")[2].removesuffix(".py")
    if BANNED_FILE.search(stem):
        yield f"{module.path}: a file is named for its one job, {stem!r} names none"
    for node in ast.walk(module.tree):
        where = f"{module.path}:{getattr(node, 'lineno', 0)}: "
        if isinstance(node, ast.ClassDef) and BANNED_CLASS.search(node.name):
            yield f"{where}class {node.name}: name what it is; no managers, no mixins"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            in_host = module.path.startswith("kvlift/runtime/hosts/")
            if BANNED_NAME.match(node.name) and node.name not in OTHERS_NAMES and not in_host:
                yield f"{where}{node.name}: its first word says nothing; name what it answers"


def _is_bool(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "bool"


def _is_true_or_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


PLAIN_VALUE_CALLS = {"setattr", "setdefault", "get", "append", "put", "set", "getattr", "field"}
"""Calls in which a boolean is the value that is kept, not a switch."""


def positional_booleans(module: Module) -> Found:
    reason = "a reader of the call cannot tell what it switches; make it a keyword"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            positional = [*node.args.posonlyargs, *node.args.args]
            defaults = [None] * (len(positional) - len(node.args.defaults)) + node.args.defaults
            for argument, default in zip(positional, defaults, strict=True):
                if _is_bool(argument.annotation) or _is_true_or_false(default):
                    yield f"{module.path}:{node.lineno}: {node.name}({argument.arg}): {reason}"
        elif isinstance(node, ast.Call) and any(map(_is_true_or_false, node.args)):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if name not in PLAIN_VALUE_CALLS:
                yield f"{module.path}:{node.lineno}: {name}(..., True or False): {reason}"


SET_MAKERS = {"set", "frozenset"}


def _is_a_set(node: ast.expr) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.BinOp) and isinstance(
        node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor
    ):
        return _is_a_set(node.left) or _is_a_set(node.right)
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in SET_MAKERS
    )


def one_order_on_every_rank(module: Module) -> Found:
    """core/ only: strings hash differently in every process, and so do sets iterate."""
    reason = "the order differs between processes, so ranks would diverge; use sorted() or a dict"
    for node in ast.walk(module.tree):
        iterated: list[ast.expr] = []
        if isinstance(node, ast.For):
            iterated = [node.iter]
        elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.DictComp):
            iterated = [part.iter for part in node.generators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in {"tuple", "list", "next", "iter", "enumerate", "dict"}:
                iterated = node.args[:1]
            if node.func.id in {"hash", "id"}:
                yield (
                    f"{module.path}:{node.lineno}: {node.func.id}() differs between processes;"
                    " digest sorted bytes instead"
                )
        for one in iterated:
            if _is_a_set(one):
                yield f"{module.path}:{one.lineno}: iterates a set: {reason}"


POLICY_WORDS = {"policy", "admission", "eviction", "step", "settle", "advance", "plan"}
PLAIN_SWITCHES = {"Switch"}
"""What effects may take from `core.policy`: an on/off value is no decision."""


def no_policy(module: Module) -> Found:
    """effects/ only: what touches the world decides nothing."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvlift.core."):
            name = (node.module or "").rpartition(".")[2]
            if name in POLICY_WORDS and {a.name for a in node.names} - PLAIN_SWITCHES:
                yield (
                    f"{module.path}:{node.lineno}: imports core.{name}: effects carry out,"
                    " the core decides"
                )


def bare_asserting_defaults(module: Module) -> Found:
    """core/ only: `case _:` may only call assert_never, or a forgotten case goes unseen."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.match_case) or node.guard is not None:
            continue
        is_wildcard = isinstance(node.pattern, ast.MatchAs) and node.pattern.pattern is None
        if is_wildcard and "assert_never" not in ast.dump(node.body[0]):
            yield (
                f"{module.path}:{node.body[0].lineno}: `case _` in core/ without assert_never:"
                " a case that is added later would fall in silently"
            )


EVERYWHERE = (
    function_length,
    file_length,
    banned_calls,
    unfinished,
    banned_names,
    positional_booleans,
)
BY_LAYER = {
    "core": (one_order_on_every_rank, bare_asserting_defaults),
    "effects": (no_policy,),
}


def listed(found: list[str]) -> str:
    return "\n" + "\n".join(found)


@pytest.mark.parametrize("rule", EVERYWHERE, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: object) -> None:
    assert callable(rule)
    found = [breach for module in modules("kvlift") for breach in rule(module)]
    assert not found, listed(found)


@pytest.mark.parametrize("layer", sorted(BY_LAYER))
def test_the_layer_keeps_its_rules(layer: str) -> None:
    kept = modules(f"kvlift/{layer}")
    found = [breach for module in kept for rule in BY_LAYER[layer] for breach in rule(module)]
    assert not found, listed(found)


def test_no_test_is_left_for_later() -> None:
    found = []
    for module in modules("tests"):
        for token in tokenize.generate_tokens(StringIO(module.text).readline):
            comment = token.type == tokenize.COMMENT
            if comment and re.search(r"\b(TODO|FIXME|XXX)\b", token.string):
                found.append(f"{module.path}:{token.start[0]}: {token.string}")
    assert not found, listed(found)


LONG = "def f() -> None:\n" + "    pass\n" * FUNCTION_LINES_MAX


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (function_length, LONG),
        (file_length, "\n" * FILE_LINES_MAX),
        (banned_calls, "eval('1')"),
        (banned_calls, "import pickle"),
        (banned_calls, "from pickle import loads"),
        (banned_calls, "import torch\ntorch.load('x')"),
        (unfinished, "# TODO: later"),
        (unfinished, "# good enough for now"),
        (unfinished, "raise NotImplementedError"),
        (banned_names, "def get_page() -> None: ..."),
        (banned_names, "class PageManager: ..."),
        (positional_booleans, "def f(fast: bool) -> None: ..."),
        (positional_booleans, "def f(fast=True): ..."),
        (positional_booleans, "f(1, True)"),
        (one_order_on_every_rank, "for x in {1, 2}: ..."),
        (one_order_on_every_rank, "a = [x for x in set(y)]"),
        (one_order_on_every_rank, "tuple(set(y) - z)"),
        (one_order_on_every_rank, "hash('a')"),
        (no_policy, "from kvlift.core.policy import Policy"),
        (bare_asserting_defaults, "match x:\n    case _:\n        pass"),
    ],
)
def test_a_breach_is_found(rule: object, text: str) -> None:
    assert callable(rule)
    assert len(list(rule(module_from(text)))) == 1


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (positional_booleans, "def f(*, fast: bool) -> None: ..."),
        (positional_booleans, "f(fast=True)"),
        (one_order_on_every_rank, "for x in sorted({1, 2}): ..."),
        (one_order_on_every_rank, "if x in {1, 2}: ..."),
        (bare_asserting_defaults, "match x:\n    case _:\n        assert_never(x)"),
        (unfinished, "# what follows is stubborn"),
        (no_policy, "from kvlift.core.policy import Switch"),
    ],
)
def test_what_is_allowed_is_not_found(rule: object, text: str) -> None:
    assert callable(rule)
    assert list(rule(module_from(text))) == []


MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|home|root|Users)/[\w.-]+|/tmp/[\w-]*jobs")
REGISTRY = re.compile(r"\b(?:pypi\.org|pythonhosted\.org|npmjs\.org|/simple/?\b.*://)")
TEXT_FILES = {
    ".py", ".md", ".toml", ".txt", ".story", ".html", ".j2", ".json", ".yml", ".yaml", ".cfg",
    ".mmd", ".svg", ".sh", "",
}  # fmt: skip
COMMITTED = ("kvlift", "tests", "docs", "examples", "benches", ".ci")


def committed_texts() -> Iterator[tuple[str, str]]:
    top = [path for path in sorted(ROOT.iterdir()) if path.is_file()]
    for path in [*top, *(path for folder in COMMITTED for path in paths(folder))]:
        if path.suffix in TEXT_FILES and path.name != "test_style.py" and path.name != ".git":
            yield str(path.relative_to(ROOT)), path.read_text(errors="replace")


def test_no_file_names_a_place_on_the_machine_of_who_wrote_it() -> None:
    found = [
        f"{name}: {match[0]}"
        for name, text in committed_texts()
        for match in MACHINE_PATH.finditer(text)
    ]
    assert not found, listed(["these paths exist on one machine only:", *found])


def test_no_file_names_a_package_registry() -> None:
    """Which registry pip asks is the user's setting. torch's index of CPU wheels is the exception:
    it stands in the Makefile alone, where a variable overrides it."""
    found = []
    for name, text in committed_texts():
        found += [f"{name}: {match[0]}" for match in REGISTRY.finditer(text)]
        if "download.pytorch.org" in text and name != "Makefile":
            found.append(f"{name}: torch's index is named in the Makefile only")
    assert not found, listed(found)
