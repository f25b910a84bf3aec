"""Loads one module of the core from other text than its file has. No file is written."""

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType, ModuleType

from kvlift.models.mutants.mutant import Mutant


class _Loader(SourceFileLoader):
    """Takes the text of a mutant for that of the real file; the name stays, for tracebacks."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.module, str(mutant.path))
        self.text = mutant.patched()

    def _data(self, path: object) -> bytes:
        """What is in the file is left aside."""
        return self.text.encode()

    get_data = _data

    def path_stats(self, path: object) -> Mapping[str, int]:
        """None: by these, compiled code would be looked for beside the file, or left there."""
        raise OSError("a mutant has no file")


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.loader = _Loader(mutant)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.mutant.module:
            return None
        return spec_from_file_location(fullname, self.mutant.path, loader=self.loader)


def code_of(mutant: Mutant) -> CodeType:
    """The mutant's module, compiled and not run. Raises `PatchFailed`, or SyntaxError."""
    loader = _Loader(mutant)
    return loader.source_to_code(loader.text.encode(), loader.path)


def seed(mutant: Mutant) -> None:
    """From now on this process has the wrong core.

    Raises RuntimeError if a part of the core is loaded already: it would keep what it knows of the
    right one. Raises `PatchFailed`."""
    loaded = sorted(name for name in sys.modules if name.startswith("kvlift.core."))
    if loaded:
        raise RuntimeError(f"{loaded[0]} is loaded already: seed a fault in a new process")
    sys.meta_path.insert(0, _Finder(mutant))
