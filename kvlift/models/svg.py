"""A diagram as one self-contained SVG file: no script, no font, no program to install.

It follows the reader's light or dark scheme. Widths of text are estimated, a little too wide.
"""

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Final

from kvlift.models.diagram import Arrow, Box, Diagram, Shape, Stroke
from kvlift.models.layered import Line, Placed, Point, Size, place

_NAME_PX, _TEXT_PX, _LEADING = 15.0, 12.0, 1.4
_PAD_X, _PAD_Y, _MARGIN, _TITLE = 16.0, 11.0, 24.0, 34.0
_NARROW: Final = frozenset("iljtfrI.,:;'|!()[] ")
_WIDE: Final = frozenset("mwMWOQDGHNU@%")

_STYLE: Final = """
  svg { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
  .page { fill: #fbfcfd; }
  .box { fill: #ffffff; stroke: #3f6fb5; stroke-width: 1.5; }
  .dot { fill: #1f2933; }
  .ring { fill: none; stroke: #1f2933; stroke-width: 1.5; }
  .line { fill: none; stroke: #8794a3; stroke-width: 1.5; }
  .implied { stroke-dasharray: 3 4; opacity: 0.65; }
  .head { fill: #8794a3; }
  .behind { fill: #fbfcfd; opacity: 0.92; }
  text { fill: #1f2933; text-anchor: middle; }
  .title { font-size: 17px; font-weight: 600; text-anchor: start; }
  .name { font-size: 15px; font-weight: 600; }
  .text { font-size: 12px; fill: #5c6875; }
  @media (prefers-color-scheme: dark) {
    .page, .behind { fill: #12181e; }
    .box { fill: #1d252d; stroke: #7ba4de; }
    .dot, text { fill: #e6ebf0; }
    .ring { stroke: #e6ebf0; }
    .line { stroke: #76838f; }
    .head { fill: #76838f; }
    .text { fill: #a3afbc; }
  }
"""


def svg(diagram: Diagram) -> str:
    """The drawing, placed in layers from top to bottom."""
    arrows = [arrow for arrow in diagram.arrows if arrow.source != arrow.target]
    placed = place(
        {box.name: _box_size(box) for box in diagram.boxes},
        [
            Line(
                source=arrow.source,
                target=arrow.target,
                label=_text_size(arrow.labels) if arrow.labels else None,
            )
            for arrow in arrows
        ],
    )
    width = max(placed.width, _width(diagram.title, 17.0)) + 2 * _MARGIN
    height = placed.height + _TITLE + 2 * _MARGIN
    title = escape(diagram.title)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" role="img" aria-label="{title}">'
        ),
        f"<style>{_STYLE}</style>",
        (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path class="head" d="M0,0.5 L8,4 L0,7.5 z"/></marker>'
            "</defs>"
        ),
        '<rect class="page" width="100%" height="100%"/>',
        f'<text class="title" x="{_MARGIN}" y="{_MARGIN + 13}">{title}</text>',
        f'<g transform="translate({_MARGIN},{_MARGIN + _TITLE})">',
        *_lines(arrows, placed),
        *(part for box in diagram.boxes for part in _box(box, placed.boxes[box.name])),
        "</g>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _lines(arrows: Sequence[Arrow], placed: Placed) -> list[str]:
    """First all lines, then all labels, so that no line crosses out a word."""
    lines, labels = [], []
    for arrow, (points, label) in zip(arrows, placed.lines, strict=True):
        kind = "line" if arrow.stroke is Stroke.PLAIN else "line implied"
        lines.append(f'<path class="{kind}" marker-end="url(#head)" d="{_curve(points)}"/>')
        if label is not None:
            labels += _label(arrow.labels, label)
    return lines + labels


def _curve(points: Sequence[Point]) -> str:
    """Through all points, upright at both ends: a cubic in y, without overshooting sideways."""
    slopes = [0.0]  # dx/dy at each point
    for (x0, y0), (x1, y1), (x2, y2) in zip(points, points[1:], points[2:], strict=False):
        before, after = (x1 - x0) / (y1 - y0), (x2 - x1) / (y2 - y1)
        turns_back = before * after <= 0
        steepest = 3 * min(abs(before), abs(after))
        slope = (x2 - x0) / (y2 - y0)
        slopes.append(0.0 if turns_back else max(-steepest, min(steepest, slope)))
    slopes.append(0.0)
    path = [f"M{points[0][0]:.1f},{points[0][1]:.1f}"]
    for i, ((x0, y0), (x1, y1)) in enumerate(pairwise(points)):
        third = (y1 - y0) / 3
        out_x, in_x = x0 + slopes[i] * third, x1 - slopes[i + 1] * third
        path.append(f"C{out_x:.1f},{y0 + third:.1f} {in_x:.1f},{y1 - third:.1f} {x1:.1f},{y1:.1f}")
    return " ".join(path)


def _label(lines: Sequence[str], centre: Point) -> list[str]:
    size = _text_size(lines)
    x, y = centre[0] - size.width / 2, centre[1] - size.height / 2
    return [
        (
            f'<rect class="behind" x="{x:.1f}" y="{y:.1f}" width="{size.width:.1f}" '
            f'height="{size.height:.1f}" rx="3"/>'
        ),
        *_text(lines, centre[0], y + 3),
    ]


def _box(box: Box, centre: Point) -> list[str]:
    x, y = centre
    match box.shape:
        case Shape.START:
            return [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="7"/>']
        case Shape.END:
            return [
                f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="8"/>',
                f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>',
            ]
        case Shape.BOX:
            size = _box_size(box)
            top = y - size.height / 2
            return [
                (
                    f'<rect class="box" x="{x - size.width / 2:.1f}" y="{top:.1f}" '
                    f'width="{size.width:.1f}" height="{size.height:.1f}" rx="8"/>'
                ),
                (
                    f'<text class="name" x="{x:.1f}" y="{top + _PAD_Y + _NAME_PX - 2:.1f}">'
                    f"{escape(box.name)}</text>"
                ),
                *_text(box.lines, x, top + _PAD_Y + _NAME_PX + 5),
            ]


def _text(lines: Sequence[str], x: float, top: float) -> list[str]:
    return [
        f'<text class="text" x="{x:.1f}" y="{top + _TEXT_PX * (_LEADING * i + 1) - 1:.1f}">'
        f"{escape(line)}</text>"
        for i, line in enumerate(lines)
    ]


def _box_size(box: Box) -> Size:
    if box.shape is not Shape.BOX:
        return Size(16, 16)
    text = _text_size(box.lines)
    width = max(_width(box.name, _NAME_PX) * 1.08, text.width - 8)
    height = _NAME_PX + (text.height if box.lines else 0)
    return Size(width + 2 * _PAD_X, height + 2 * _PAD_Y)


def _text_size(lines: Sequence[str]) -> Size:
    width = max((_width(line, _TEXT_PX) for line in lines), default=0.0)
    return Size(width + 8, _TEXT_PX * _LEADING * len(lines) + 4)


def _width(text: str, px: float) -> float:
    """About the width of a sans serif text."""
    ems = sum(0.32 if c in _NARROW else 0.86 if c in _WIDE else 0.58 for c in text)
    return ems * px
