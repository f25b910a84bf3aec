"""The report: one HTML file that needs nothing else."""

import html
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final

from kvlift.runtime.demo.plots import (
    MODE_NAMES,
    SOURCES,
    life_of,
    tokens_by_source,
    tokens_from,
    ttft_by_round,
)
from kvlift.runtime.demo.result import DemoResult
from kvlift.runtime.demo.timeline import Timeline

REPORT: Final = "report.html"
CAPTION: Final = "TTFT and TPOT in ms, mean unless said; prompt tokens by source"
HEADINGS: Final = (
    "mode", "TTFT mean", "p50", "p90", "p99", "TPOT mean", "p90", *SOURCES, "from peer", "TTFT",
)  # fmt: skip


def number(value: float | None, unit: str = "") -> str:
    """For people: three digits that matter."""
    if value is None:
        return "–"
    return f"{value:.0f}{unit}" if abs(value) >= 100 else f"{value:.1f}{unit}"


def percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{fraction * 100:+.0f} %"


def size(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB"


def table_rows(result: DemoResult) -> list[tuple[str, ...]]:
    """A row a mode, a cell a heading; milliseconds and tokens."""
    rows = []
    for mode, numbers in result.modes.items():
        change = result.change_vs_none_by_mode.get(mode)
        ttft, tpot = numbers.ttft_ms, numbers.tpot_ms
        rows.append(
            (
                MODE_NAMES[mode],
                *(number(value) for value in (ttft.mean, ttft.p50, ttft.p90, ttft.p99)),
                *(number(value) for value in (tpot.mean, tpot.p90)),
                *(str(tokens_from(numbers.hit, source)) for source in SOURCES),
                size(numbers.bytes_from_peer),
                percent(change.ttft_mean) if change else "–",
            )
        )
    return rows


def short_rows(result: DemoResult) -> list[tuple[str, ...]]:
    """Headings and rows for a terminal of 80 columns."""
    rows: list[tuple[str, ...]] = [
        ("mode", "TTFT", "p90", "p99", "vs none", "TPOT", *SOURCES, "peer MB"),
    ]
    for mode, numbers in result.modes.items():
        change = result.change_vs_none_by_mode.get(mode)
        ttft = numbers.ttft_ms
        rows.append(
            (
                MODE_NAMES[mode],
                *(number(value) for value in (ttft.mean, ttft.p90, ttft.p99)),
                percent(change.ttft_mean) if change else "–",
                number(numbers.tpot_ms.mean),
                *(str(tokens_from(numbers.hit, source)) for source in SOURCES),
                f"{numbers.bytes_from_peer / 1e6:.1f}",
            )
        )
    return rows


def proofs_of(result: DemoResult) -> list[tuple[str, str]]:
    """What was checked, and what came out."""
    n_requests = sum(numbers.requests for numbers in result.modes.values())
    n_failed = sum(numbers.failed for numbers in result.modes.values())
    identical = "yes" if result.tokens_identical else "NO"
    return [
        ("tokens identical (modes, plain forward)", identical),
        ("log-probabilities differ at most by", f"{result.logprob_diff_max:.2g}"),
        (
            "restored pages compared with recomputed",
            f"{result.pages_verified}, {result.pages_wrong} wrong, off by {result.kv_diff_max:.2g}",
        ),
        ("requests", f"{n_requests}, {n_failed} failed"),
        ("ballots a tick, at most", str(result.ballots_per_tick_max)),
        ("leaked pages, pins, tickets", str(result.leaks)),
    ]


def write_report(result: DemoResult, timeline: Timeline | None, folder: Path) -> Path:
    """Raises `OSError`."""
    template = Template(files(__package__ or "").joinpath("report.html").read_text("utf-8"))
    escape = html.escape
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADINGS)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in table_rows(result)
    )
    proofs = "".join(
        f"<tr><td>{escape(what)}</td><td>{escape(came_out)}</td></tr>"
        for what, came_out in proofs_of(result)
    )
    faults = "".join(f"<li>{escape(fault)}</li>" for fault in result.faults)
    text = template.substitute(
        workload=escape(result.workload),
        machine=escape(result.machine),
        setting=escape(setting_of(result)),
        verdict="Everything holds." if not result.faults else "This does not hold:",
        faults=f"<ul class='faults'>{faults}</ul>" if faults else "",
        head=head,
        body=body,
        proofs=proofs,
        ttft=ttft_by_round(result),
        tokens=tokens_by_source(result),
        life_of=escape(timeline.rid) if timeline else "",
        life=life_of(timeline) if timeline else "<p>The journal has nothing to tell.</p>",
    )
    path = folder / REPORT
    path.write_text(text, encoding="utf-8")
    return path


def setting_of(result: DemoResult) -> str:
    link = f"{result.link_gbps:g} Gbit/s" if result.link_gbps else "not slowed down"
    return (
        f"model {result.model}, {result.ranks} decode ranks and a prefill process, "
        f"{result.device}; link from prefill {link}; seed {result.seed}"
    )
