"""Why mutants that live may live: each by its change, so that a new numbering changes nothing.

`explained.toml` is written by hand. A change is the lines that go and the lines that come.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.mutation.breed import Mutant

REASONS: Final = Path(__file__).with_name("explained.toml")
BEGIN, END = "<!-- survivors -->\n", "<!-- /survivors -->\n"


def reasons(file: Path = REASONS) -> dict[tuple[str, str, str], str]:
    """The reason of each (function, goes, comes). Raises ValueError for one that is there twice."""
    entries = tomllib.loads(file.read_text(encoding="utf-8")).get("survivor", [])
    found: dict[tuple[str, str, str], str] = {}
    for entry in entries:
        why = entry["why"]
        for comes in entry["comes"]:
            key = (entry["function"], entry["goes"], comes)
            if key in found:
                raise ValueError(f"{file.name} explains one change twice: {key}")
            found[key] = why
    return found


def key_of(mutant: Mutant) -> tuple[str, str, str]:
    module = Path(mutant.file).stem
    diff = mutant.diff()
    goes = " ".join(line[2:] for line in diff if line[0] == "-")
    comes = " ".join(line[2:] for line in diff if line[0] == "+")
    return f"{module}.{mutant.function}", goes, comes


def table(alive: Sequence[Mutant], known: Mapping[tuple[str, str, str], str]) -> str:
    """The mutants that live as a table of a document, those without a reason first."""
    rows = []
    for mutant in sorted(alive, key=lambda m: (key_of(m) in known, m.file, m.lines)):
        function, goes, comes = (_quoted(text) for text in key_of(mutant))
        number = mutant.name.rpartition("_")[2]
        why = known.get(key_of(mutant), "**not explained**")
        rows.append(f"| {function} {number} | {goes} | {comes} | {why} |\n")
    head = "| function, number | goes | comes | why nothing notices |\n|---|---|---|---|\n"
    return head + "".join(rows)


def _quoted(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`" if text else "(nothing)"


def written(document: str, alive: Sequence[Mutant]) -> str:
    """The document with the table of survivors between its marks."""
    before, _, rest = document.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the document has no marks {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}{table(alive, reasons())}{mark}{after}"
