"""Which layer may import which: `effects -> core`, `models -> core`, `runtime -> effects, core`,
`testing -> runtime, effects, core`, `cli -> all`, nothing else."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.source import Module, module_from, modules

MAY_IMPORT = {
    "core": {"core"},
    "effects": {"core", "effects"},
    "models": {"core", "models"},
    "runtime": {"core", "effects", "runtime"},
    "testing": {"core", "effects", "runtime", "testing"},
    "cli": {"core", "effects", "runtime", "models", "testing", "cli"},
}

CORE_LIBRARIES = {
    "__future__", "abc", "attrs", "base64", "binascii", "bisect", "collections", "contextlib",
    "dataclasses", "enum", "functools", "hashlib", "heapq", "itertools", "math", "operator",
    "struct", "textwrap", "types", "typing",
}  # fmt: skip
"""attrs, and the part of the standard library in which no clock, chance, file or log hides."""

TEST_LIBRARIES = {"hypothesis", "pytest", "_pytest"}


OPTIONAL_LIBRARIES = {
    "prometheus_client", "starlette", "uvicorn", "tokenizers", "vllm", "sglang", "scipy", "triton",
}  # fmt: skip
"""Brought by extras or by hosts; a module that needs one may fail to import without it."""


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, the ones inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are banned (ruff TID252)"
            name = node.module or ""
            names = [f"{name}.{a.name}" for a in node.names] if name == "kvlift" else [name]
            yield from ((node.lineno, one) for one in names)


def strays(module: Module) -> list[str]:
    """What this file may not import, with the reason."""
    found = []
    for line, name in imported(module.tree):
        top, _, rest = name.partition(".")
        where = f"{module.path}:{line}: "
        if top == "tests":
            found.append(f"{where}the package may not import its tests")
        elif top in TEST_LIBRARIES:
            found.append(f"{where}{top} is needed by tests/ only; users do not have it")
        elif top == "kvlift" and module.layer:
            layer = rest.partition(".")[0]
            if layer not in MAY_IMPORT[module.layer]:
                found.append(
                    f"{where}{module.layer}/ may not import {name}: it may know"
                    f" {', '.join(sorted(MAY_IMPORT[module.layer]))}"
                )
        elif module.layer == "core" and top not in CORE_LIBRARIES:
            found.append(f"{where}core/ may not import {top}: values in, values out")
    return found


def test_every_layer_imports_only_what_lies_below_it() -> None:
    found = [stray for module in modules("kvlift") for stray in strays(module)]
    assert not found, "\n" + "\n".join(found)


def test_every_folder_of_the_package_is_a_known_layer() -> None:
    assert {module.layer for module in modules("kvlift")} - {""} <= set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("kvlift/core/a.py", "import torch"),
        ("kvlift/core/a.py", "import time"),
        ("kvlift/core/a.py", "from os import path"),
        ("kvlift/core/a.py", "def f():\n    import random"),
        ("kvlift/core/a.py", "from kvlift.effects.ports import Ranks"),
        ("kvlift/core/a.py", "from kvlift import effects"),
        ("kvlift/effects/a.py", "import kvlift.runtime.driver"),
        ("kvlift/models/a.py", "from kvlift.runtime import driver"),
        ("kvlift/models/a.py", "from kvlift.effects.ports import Ranks"),
        ("kvlift/runtime/a.py", "from kvlift.testing import clock"),
        ("kvlift/runtime/a.py", "from kvlift.models import explore"),
        ("kvlift/testing/a.py", "from kvlift.models.explore import explore"),
        ("kvlift/testing/a.py", "import pytest"),
        ("kvlift/runtime/a.py", "from tests.source import ROOT"),
    ],
)
def test_an_import_upwards_is_found(path: str, line: str) -> None:
    assert len(strays(module_from(line, path))) == 1


def test_imports_downwards_are_allowed() -> None:
    for path, line in [
        ("kvlift/core/a.py", "from collections.abc import Iterator\nimport attrs"),
        ("kvlift/effects/a.py", "import torch\nfrom kvlift.core.ids import Rid"),
        ("kvlift/cli/a.py", "from kvlift.models import explore"),
    ]:
        assert strays(module_from(line, path)) == []


def test_the_core_loads_without_torch() -> None:
    names = [module.path.removesuffix(".py").replace("/", ".") for module in modules("kvlift/core")]
    imports = "\n".join(f"import {name.removesuffix('.__init__')}" for name in names)
    script = f"""import sys
{imports}
assert not {{'torch', 'numpy', 'zmq', 'msgspec'}} & set(sys.modules)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("layer", sorted(set(MAY_IMPORT) - {"cli"}))
def test_every_module_of_a_layer_can_be_imported(layer: str) -> None:
    for module in modules(f"kvlift/{layer}"):
        name = module.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in OPTIONAL_LIBRARIES:
                raise
