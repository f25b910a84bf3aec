"""The surfaces by name. Each is imported only where it is fed."""

import importlib
from typing import Final, cast

from tests.fuzz.harness import Surface

SURFACES: Final = ("wire", "pages", "journal", "story", "http")
GUIDED: Final = ("wire", "pages", "journal", "story")
"""Where bytes are decoded: what atheris is for. HTTP bodies are parsed by msgspec alone."""


def surface_of(name: str) -> Surface:
    module = importlib.import_module(f"tests.fuzz.{name}_surface")
    return cast("Surface", getattr(module, f"{name.capitalize()}Surface")())
