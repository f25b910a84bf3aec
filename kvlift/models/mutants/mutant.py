"""A wrong core: one small change of the real source, and what became of it."""

from pathlib import Path
from typing import Final

from attrs import frozen

CORE: Final = Path(__file__).parents[2] / "core"
"""The folder whose files are changed. Found by place: importing the core would load it."""


class PatchFailed(Exception):
    """The old text of a mutant is not in its file exactly once; the sentence says what to do."""


@frozen(kw_only=True)
class Mutant:
    """`old` must occur exactly once in `file` (a name in the core's folder); `new` replaces it.

    `why`: the bug of real systems that it is. `expects`: the world, or the `.story`, in which it is
    looked for first. Where it is not found there everything else is tried.
    """

    name: str
    file: str
    old: str
    new: str
    why: str
    expects: str

    @property
    def module(self) -> str:
        """The full name of the module that this file is."""
        return f"kvlift.core.{self.file.removesuffix('.py')}"

    @property
    def path(self) -> Path:
        return CORE / self.file

    def patched(self) -> str:
        """The file's text with the fault. Raises `PatchFailed`."""
        text = self.path.read_text(encoding="utf-8")
        n_found = text.count(self.old)
        if n_found != 1:
            raise PatchFailed(
                f"mutant {self.name!r}: its old text occurs {n_found} times in {self.file}; "
                "choose a text that occurs exactly once"
            )
        return text.replace(self.old, self.new)


@frozen(kw_only=True)
class Killed:
    """Whether a fault was found, by which claim of which world (or which story), and after how many
    moves; `steps` is None where a claim is about a whole world, not about a run of it.
    `cpu_s`: seconds of processor time that it took."""

    name: str
    killed: bool
    by: str | None
    steps: int | None
    cpu_s: float = 0.0
