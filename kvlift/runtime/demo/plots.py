"""The report's drawings as SVG text that can stand in a page, bright or dark.

Lines and letters take the page's own colour (`currentColor`); the colours of the series can be read
on both.
"""

import math
import re
from collections.abc import Callable, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from kvlift.runtime.demo.result import DemoResult, Hits
from kvlift.runtime.demo.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK: Final = "#010203"
"""Stands for the page's own colour until the drawing is text."""

COLOURS: Final = {
    "none": "#8a8f98",
    "device": "#2f8f5b",
    "host": "#3b7dd8",
    "all": "#d9713c",
    "storage": "#d9713c",
    "peer": "#8a8f98",
}
ROW_COLOURS: Final = {
    "wait for admission": "#8a8f98",
    "storage: look up": "#c9a227",
    "storage → host": "#d9713c",
    "host → device": "#3b7dd8",
    "peer → device": "#9465c9",
    "decode": "#2f8f5b",
}
SOURCES: Final = ("device", "host", "storage", "peer")
MODE_NAMES: Final = {"none": "none", "device": "device", "host": "device+host", "all": "all"}

STYLE: Final[dict[str, Any]] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


def _svg(draw: Callable[["Axes"], None], salt: str, *, height: float) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {**STYLE, "svg.hashsalt": salt}
    with mpl.rc_context(style):
        figure = Figure(figsize=(8.0, height), layout="constrained")
        figure.patch.set_alpha(0.0)
        axes = figure.subplots()
        axes.patch.set_alpha(0.0)
        draw(axes)
        written = StringIO()
        empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", metadata=empty)
    text = written.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    # Identifiers are unique within a drawing only, and a page holds several.
    text = re.sub(r'\bid="', f'id="{salt}-', text)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{salt}-", text)


def ttft_by_round(result: DemoResult) -> str:
    """A line a mode, a mark where device and host were flushed."""

    def draw(axes: "Axes") -> None:
        for mode in result.modes:
            rows = [row for row in result.rounds if row.mode == mode]
            axes.plot(
                [row.round for row in rows],
                [math.nan if row.ttft_ms_mean is None else row.ttft_ms_mean for row in rows],
                marker="o",
                color=COLOURS[mode],
                label=MODE_NAMES[mode],
            )
        after = [row.round for row in result.rounds if row.is_after_flush]
        if after:
            axes.axvline(min(after) - 0.5, color=INK, linestyle=":", linewidth=1)
            top = axes.get_ylim()[1]
            axes.text(min(after) - 0.45, top, "flush of device and host", va="top", fontsize=9)
        axes.set_xticks(sorted({row.round for row in result.rounds}))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("round")
        axes.set_ylabel("time to first token, mean (ms)")
        axes.legend(loc="best")

    return _svg(draw, "ttft", height=3.6)


def tokens_by_source(result: DemoResult) -> str:
    """A bar a mode, cut by where the prompt's KV came from."""

    def draw(axes: "Axes") -> None:
        modes = list(result.modes)
        starts = [0] * len(modes)
        for source in SOURCES:
            values = [tokens_from(result.modes[mode].hit, source) for mode in modes]
            names = [MODE_NAMES[mode] for mode in modes]
            axes.barh(names, values, left=starts, color=COLOURS[source], label=source)
            starts = [start + value for start, value in zip(starts, values, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("prompt tokens")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=len(SOURCES))

    return _svg(draw, "tokens", height=0.8 + 0.5 * len(result.modes))


def tokens_from(hit: Hits, source: str) -> int:
    return int(getattr(hit, source))


def life_of(timeline: Timeline) -> str:
    """What one request waited for, on rank 0."""
    rows = [row for row in ROW_COLOURS if any(bar.row == row for bar in timeline.bars)]

    def draw(axes: "Axes") -> None:
        stop_most = max(bar.stop_ms for bar in timeline.bars)
        for bar in timeline.bars:
            # What is over within one tick still shows as a line.
            width = max(bar.stop_ms - bar.start_ms, stop_most / 400)
            y = rows.index(bar.row)
            axes.barh(y, width, left=bar.start_ms, color=ROW_COLOURS[bar.row], height=0.6)
            if bar.n_pages:
                words = f" {bar.n_pages} page{'s' if bar.n_pages > 1 else ''}"
                axes.text(bar.start_ms + width, y, words, va="center", fontsize=9)
        for at_ms, words in _marks(timeline):
            axes.axvline(at_ms, color=INK, linestyle=":", linewidth=1)
            axes.text(at_ms, -0.7, words, fontsize=9, ha="right", va="bottom")
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel("ms after its submission")

    return _svg(draw, "life", height=1.2 + 0.4 * len(rows))


def _marks(timeline: Timeline) -> Sequence[tuple[float, str]]:
    return [(timeline.ready_ms, "ready ")] if timeline.ready_ms is not None else []
