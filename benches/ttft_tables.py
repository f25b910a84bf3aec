"""The table of the multi-turn bench, for `benches/figures.py`."""

from collections.abc import Mapping
from typing import Any, Final

Result = Mapping[str, Any]

MODES: Final = {"none": "none", "device": "device", "host": "device + host", "all": "all"}
PARTS: Final = ("mean", "p90", "p99")


def ttft_table(result: Result) -> list[str]:
    """A row a link rate and mode; in brackets what the measured rates allow."""
    lines = [
        (
            "| link, Gb/s | tiers | TTFT mean, ms | against none: mean, P90, P99 | allowed "
            "| TPOT at equal batch, 95 % interval | hit rate | from prefill |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    plays = [row for row in result["rows"] if "mode" in row]
    plays.sort(key=lambda row: (row["gbps"], list(MODES).index(row["mode"])))
    lines += [f"| {' | '.join(_cells(row))} |" for row in plays]
    n_requests = sum(row["requests"] for row in plays)
    n_failed, n_leaks = (sum(row[name] for row in plays) for name in ("failed", "leaks"))
    n_verified = sum(row["pages_verified"] for row in plays)
    sizes = result["sizes"]
    prompts = ", ".join(f"{n // 1024}K" for n in sizes["prompt_tokens"])
    said = (
        f"{sizes['n_conversations']} conversations, prompts of {prompts} tokens, "
        f"{sizes['n_output']} tokens out; {sizes['device_pages'] / 128:g} GiB of KV on the device, "
        f"{sizes['host_pages'] / 128:g} GiB on the host. {n_requests} requests, {n_failed} failed, "
        f"{n_leaks} left over; {n_verified} pages compared, all equal."
    )
    return [*lines, "", said]


def _cells(row: Result) -> list[str]:
    change, allowed, tpot = "", "", ""
    if row.get("change_vs_none"):
        change = ", ".join(_percent(row["change_vs_none"][part]) for part in PARTS)
        allowed = ", ".join(_percent(row["change_allowed"][part]) for part in PARTS)
        taken = row["tpot_change_equal_batch"]
        low, high = (100 * taken[end] for end in ("low", "high"))
        tpot = f"{100 * taken['mean']:+.1f} % [{low:+.1f}, {high:+.1f}]"
    return [
        f"{row['gbps']:g}",
        MODES[row["mode"]],
        f"{row['ttft_ms']['mean']:,.0f} (allowed {row['ttft_allowed_ms']['mean']:,.0f})",
        change,
        allowed,
        tpot,
        f"{row['hit_rate']:.3f} of {row['hit_rate_ideal']:.3f}",
        f"{row['bytes_from_peer'] / 1e9:.1f} GB",
    ]


def _percent(fraction: float) -> str:
    return f"{100 * fraction:+.1f} %".replace("-0.0", "+0.0")
