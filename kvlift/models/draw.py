"""The drawings of the manual, each made from the code that it shows.

`statechart` and `mirror` come from the tables of arrows, `layers` from the imports of all files,
`tick` from the numbered steps in the driver's documentation.
"""

import ast
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from kvlift.models.charts import CHARTS, Chart
from kvlift.models.diagram import (
    Arrow,
    Box,
    Diagram,
    Shape,
    Stroke,
    mermaid_flow,
    mermaid_states,
)
from kvlift.models.svg import svg

PACKAGE: Final = Path(__file__).resolve().parents[1]
"""The folder of kvlift."""

_START, _END = "start", "end"
_N_TICK_STEPS: Final = 5
_ABOUT_WIDTH: Final = 58
_MARKED: Final = re.compile(
    r"(?P<open><!-- draw:(?P<name>[a-z]+) -->\n)(?P<body>.*?)(?P<close><!-- /draw -->)", re.DOTALL
)


def statechart(chart: Chart) -> Diagram:
    """One box a phase, one arrow for all events that lead from one phase to the same other one."""
    events: dict[tuple[str, str], list[str]] = {}
    for before, event, after in chart.edges:
        events.setdefault((before.__name__, after.__name__), []).append(event.__name__)
    names = _in_reading_order(chart)
    rank = {name: place for place, name in enumerate(names)}
    last = [name for name in names if not any(source == name for source, _ in events)]
    boxes = [Box(name=_START, shape=Shape.START)]
    for name in names:
        stays = ", ".join(sorted(events.get((name, name), [])))
        lines = textwrap.wrap(f"stays on {stays}", 44) if stays else []
        boxes.append(Box(name=name, lines=tuple(lines)))
    boxes.append(Box(name=_END, shape=Shape.END))
    moving = sorted(
        (pair for pair in events if pair[0] != pair[1]), key=lambda p: (rank[p[0]], rank[p[1]])
    )
    return Diagram(
        title=chart.about,
        boxes=boxes,
        arrows=[
            Arrow(source=_START, target=chart.initial.__name__),
            *(
                Arrow(source=source, target=target, labels=tuple(sorted(events[source, target])))
                for source, target in moving
            ),
            *(Arrow(source=name, target=_END) for name in last),
        ],
    )


def _in_reading_order(chart: Chart) -> list[str]:
    """Phases by their distance from the first one, then by name."""
    found = [chart.initial.__name__]
    for name in found:  # grows while it is read
        targets = {after.__name__ for before, _, after in chart.edges if before.__name__ == name}
        found += sorted(targets - set(found))
    phases = {phase.__name__ for before, _, after in chart.edges for phase in (before, after)}
    return found + sorted(phases - set(found))


def layers(package: Path = PACKAGE) -> Diagram:
    """The packages of kvlift and who imports whom; an arrow that others imply is drawn dotted."""
    imports = imports_between(package)
    names = sorted({name for pair in imports for name in pair})
    n_below = {name: len(_reached(imports, name)) for name in names}
    ordered = sorted(names, key=lambda name: (-n_below[name], name))
    arrows = []
    for source, target in sorted(imports, key=lambda p: (ordered.index(p[0]), ordered.index(p[1]))):
        others = {(a, b) for a, b in imports if (a, b) != (source, target)}
        is_implied = target in _reached(others, source)
        stroke = Stroke.IMPLIED if is_implied else Stroke.PLAIN
        arrows.append(Arrow(source=source, target=target, stroke=stroke))
    boxes = [Box(name=name, lines=_about(package / name / "__init__.py")) for name in ordered]
    return Diagram(title="Who imports whom", boxes=boxes, arrows=arrows)


def imports_between(package: Path) -> frozenset[tuple[str, str]]:
    """(importing, imported) packages directly below `package`, from the source of all files."""
    found: set[tuple[str, str]] = set()
    for file in sorted(package.rglob("*.py")):
        owner = file.relative_to(package).parts[0]
        if owner.endswith(".py"):
            continue
        for name in _imported(ast.parse(file.read_text(encoding="utf-8"))):
            parts = name.split(".")
            if len(parts) > 1 and parts[0] == package.name and (package / parts[1]).is_dir():
                found.add((owner, parts[1]))
    return frozenset((a, b) for a, b in found if a != b)


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _reached(pairs: frozenset[tuple[str, str]] | set[tuple[str, str]], start: str) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        at = todo.pop()
        new = {target for source, target in pairs if source == at} - found
        found |= new
        todo += sorted(new)
    return found


def _about(file: Path) -> tuple[str, ...]:
    """The first sentence of a module's documentation, wrapped."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) if file.exists() else None
    if not text:
        return ()
    return tuple(textwrap.wrap(text.split("\n\n")[0].replace("\n", " "), _ABOUT_WIDTH))


def tick(driver: Path = PACKAGE / "runtime" / "driver.py") -> Diagram:
    """The steps of a tick, in a ring.

    Reads the numbered list (`1. hear: what it does`) in the documentation of the module, of its
    classes or of their `tick`. Raises ValueError where there is none with five steps.
    """
    steps = _numbered_steps(driver)
    names = list(steps)
    boxes = [
        Box(name=name, lines=tuple(textwrap.wrap(about, _ABOUT_WIDTH)))
        for name, about in steps.items()
    ]
    arrows = [Arrow(source=a, target=b) for a, b in itertools.pairwise(names)]
    arrows.append(Arrow(source=names[-1], target=names[0], labels=("next tick",)))
    return Diagram(title="One tick", boxes=boxes, arrows=arrows)


def _numbered_steps(file: Path) -> dict[str, str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        found = re.findall(
            r"^ *\d\. +\W*(\w+)\W*?[:,] +(.+(?:\n +(?! |\d\.).+)*)", text or "", re.MULTILINE
        )
        if len(found) == _N_TICK_STEPS:
            return {name: " ".join(about.split()) for name, about in found}
    raise ValueError(
        f"{file.name} documents no tick: write its {_N_TICK_STEPS} steps as a numbered list, "
        "`1. hear: what landed here`"
    )


DRAWINGS: Final[Mapping[str, Callable[[], Diagram]]] = MappingProxyType(
    {
        "statechart": lambda: statechart(CHARTS["request"]),
        "mirror": lambda: statechart(CHARTS["mirror"]),
        "layers": layers,
        "tick": tick,
    }
)
"""All drawings, by the name that the README and the command use."""

_STATES: Final = frozenset({"statechart", "mirror"})


def mermaid(name: str) -> str:
    """One drawing as Mermaid text. Raises KeyError for a name that is not in DRAWINGS."""
    diagram = DRAWINGS[name]()
    return mermaid_states(diagram) if name in _STATES else mermaid_flow(diagram)


def picture(name: str) -> str:
    """One drawing as SVG. Raises KeyError for a name that is not in DRAWINGS."""
    return svg(DRAWINGS[name]())


def marked(text: str) -> list[str]:
    """The names between the markers of a document. Raises ValueError for one without a drawing."""
    names = [match["name"] for match in _MARKED.finditer(text)]
    for name in names:
        if name not in DRAWINGS:
            raise ValueError(f"no drawing is called {name!r}: there are {', '.join(DRAWINGS)}")
    return names


def redrawn(text: str) -> str:
    """The document with fresh drawings between `<!-- draw:NAME -->` and `<!-- /draw -->`."""
    marked(text)

    def fresh(match: re.Match[str]) -> str:
        return f"{match['open']}```mermaid\n{mermaid(match['name'])}```\n{match['close']}"

    return _MARKED.sub(fresh, text)


def stale(text: str) -> list[str]:
    """The names of the drawings in a document that are not what the code says now."""
    fresh = _MARKED.finditer(redrawn(text))
    return [
        old["name"]
        for old, new in zip(_MARKED.finditer(text), fresh, strict=True)
        if old["body"] != new["body"]
    ]
