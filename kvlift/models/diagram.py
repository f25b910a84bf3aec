"""What the drawings have in common: boxes, arrows, and how both become text for Mermaid."""

from collections.abc import Sequence
from enum import Enum

from attrs import frozen


class Shape(Enum):
    """How a box is drawn."""

    BOX = "box"
    START = "start"
    END = "end"


class Stroke(Enum):
    """How an arrow is drawn. IMPLIED: it follows from others, and stays in the background."""

    PLAIN = "plain"
    IMPLIED = "implied"


@frozen(kw_only=True)
class Box:
    """`lines` stand below the name, smaller. START and END have neither."""

    name: str
    lines: tuple[str, ...] = ()
    shape: Shape = Shape.BOX


@frozen(kw_only=True)
class Arrow:
    """From box to box, by name. `labels`: one line each."""

    source: str
    target: str
    labels: tuple[str, ...] = ()
    stroke: Stroke = Stroke.PLAIN


@frozen(kw_only=True)
class Diagram:
    """Boxes in the order in which they should be read."""

    title: str
    boxes: Sequence[Box]
    arrows: Sequence[Arrow]


def mermaid_states(diagram: Diagram) -> str:
    """A Mermaid state diagram. What keeps a phase in itself becomes a note beside it."""
    start = {box.name for box in diagram.boxes if box.shape is not Shape.BOX}
    lines = ["stateDiagram-v2"]
    for arrow in diagram.arrows:
        source, target = ("[*]" if n in start else n for n in (arrow.source, arrow.target))
        label = f": {', '.join(arrow.labels)}" if arrow.labels else ""
        lines.append(f"    {source} --> {target}{label}")
    for box in diagram.boxes:
        if box.lines:
            lines.append(f"    note right of {box.name}")
            lines += [f"        {line}" for line in box.lines]
            lines.append("    end note")
    return "\n".join(lines) + "\n"


def mermaid_flow(diagram: Diagram) -> str:
    """A Mermaid flow chart, top to bottom; implied arrows are dotted."""
    lines = ["flowchart TD"]
    for box in diagram.boxes:
        text = "<br/>".join([f"<b>{box.name}</b>", *box.lines])
        lines.append(f'    {box.name}["{text}"]')
    for arrow in diagram.arrows:
        line = "-->" if arrow.stroke is Stroke.PLAIN else "-.->"
        label = f'|"{"<br/>".join(arrow.labels)}"|' if arrow.labels else ""
        lines.append(f"    {arrow.source} {line}{label} {arrow.target}")
    return "\n".join(lines) + "\n"
