"""From plays to rows: one a link rate and mode, each beside what the measured rates allow."""

import statistics
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from kvlift.cli.benches.row import Row
from kvlift.cli.benches.ttft.allowed import Asked, allowed_ttfts
from kvlift.cli.benches.ttft.machine import Machine, Rates
from kvlift.cli.benches.ttft.play import Played
from kvlift.cli.benches.ttft.sizes import Sizes
from kvlift.cli.benches.ttft.tpot import change_at_equal_batch
from kvlift.core.tier import Source

CHANGE_MIN = 0.01
"""A smaller possible change is below what two plays of one mode differ by: no ratio is told."""

SOURCES = (Source.DEVICE, Source.HOST, Source.STORAGE, Source.PEER)


def row_of(played: Played, none: Played | None, sizes: Sizes, rates: Rates) -> Row:
    """`none`: the play of mode none over the same link; without it nothing is compared."""
    base = none or played
    ttfts = {one.turn.rid: one.ttft_s for one in played.served if one.ready_s is not None}
    allowed = _allowed(played, base, sizes, rates)
    figures: dict[str, object] = {
        "gbps": played.gbps,
        "mode": played.mode,
        "ttft_ms": _summary(list(ttfts.values())),
        "ttft_allowed_ms": _summary(list(allowed.values())),
        "tpot_ms": _summary([one.tpot_s for one in played.served if one.ended_s]),
        "step_ms": round(statistics.median(step.ms for step in played.times), 4),
        "slowest_steps": [
            (round(step.ms, 3), step.n_rows, step.n_tokens)
            for step in sorted(played.times, key=lambda step: -step.ms)[:8]
        ],
        "hit": _hits(played, sizes),
        "hit_rate": round(_hit_rate(played, sizes), 4),
        "hit_rate_ideal": round(_hit_rate_ideal(sizes), 4),
        "bytes_from_peer": played.bytes_from_peer,
        "requests": len(played.served),
        "failed": sum(bool(one.failed) for one in played.served),
        "pages_verified": played.n_verified,
        "leaks": played.leaks,
        "lag_ms": _lags(played),
        "tick_ms": _ticks(played),
        "wall_s": round(played.wall_s, 2),
        "prefill_s": round(sum(sum(one.chunks_s) for one in played.computed.values()), 3),
        "ttft_ms_by_round": _by_round(ttfts, sizes),
        "ttft_allowed_ms_by_round": _by_round(allowed, sizes),
    }
    if none is not None and none is not played:
        figures |= _against(played, none, ttfts, allowed, sizes, rates)
    mean_ms = statistics.mean(ttfts.values()) * 1e3
    allowed_ms = statistics.mean(allowed.values()) * 1e3
    return Row(
        case=f"{played.gbps:g}Gbps-{played.mode}",
        value=round(mean_ms, 3),
        unit="ms",
        ceiling=round(allowed_ms, 3),
        ratio=round(mean_ms / allowed_ms, 4),
        note="mean TTFT; ceiling: what prefill, link and restore rates allow",
        more=figures,
    )


def _against(
    played: Played,
    none: Played,
    ttfts: Mapping[str, float],
    allowed: Mapping[str, float],
    sizes: Sizes,
    rates: Rates,
) -> dict[str, object]:
    before = {one.turn.rid: one.ttft_s for one in none.served if one.ready_s is not None}
    allowed_before = _allowed(none, none, sizes, rates)
    change = _changes(list(ttfts.values()), list(before.values()))
    allowed_change = _changes(list(allowed.values()), list(allowed_before.values()))
    tpot = change_at_equal_batch(played, none)
    return {
        "change_vs_none": change,
        "change_allowed": allowed_change,
        "reached": {
            name: round(change[name] / possible, 4) if possible < -CHANGE_MIN else None
            for name, possible in allowed_change.items()
        },
        "slower_than_none": sum(ttfts[rid] > before[rid] for rid in ttfts if rid in before),
        "tpot_change_equal_batch": None if tpot is None else attrs.asdict(tpot),
        "tpot_change_mean": round(
            statistics.mean(one.tpot_s for one in played.served if one.ended_s)
            / statistics.mean(one.tpot_s for one in none.served if one.ended_s)
            - 1,
            4,
        ),
    }


def _allowed(played: Played, none: Played, sizes: Sizes, rates: Rates) -> dict[str, float]:
    """With the chunk times of mode none over the same link, and this play's hits."""
    asked = []
    for one in played.served:
        rid = one.turn.rid
        pages = one.pages
        asked.append(
            Asked(
                one.turn,
                sizes.prompt_tokens[one.turn.round] // sizes.page_tokens,
                tuple(none.computed[rid].chunks_s),
                pages.get(Source.HOST.value, 0),
                pages.get(Source.STORAGE.value, 0),
                pages.get(Source.PEER.value, 0),
            )
        )
    page_bytes = sizes.layout.page_bytes
    chunk_pages = sizes.chunk_tokens // sizes.page_tokens
    return allowed_ttfts(asked, rates, played.gbps, page_bytes, chunk_pages)


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    ms = np.array(seconds) * 1e3
    return {
        "mean": round(float(ms.mean()), 3),
        **{f"p{p}": round(float(np.percentile(ms, p)), 3) for p in (50, 90, 99)},
    }


def _changes(now: Sequence[float], before: Sequence[float]) -> dict[str, float]:
    after, base = _summary(now), _summary(before)
    return {name: round(after[name] / base[name] - 1, 4) for name in ("mean", "p90", "p99")}


def _lags(played: Played) -> dict[str, float]:
    """Means."""
    return {
        "arrival_to_want": round(statistics.mean(lag.to_want_s for lag in played.lags) * 1e3, 2),
        "landing_to_ready": round(statistics.mean(lag.to_ready_s for lag in played.lags) * 1e3, 2),
    }


def _ticks(played: Played) -> dict[str, float]:
    """The ticks with an effect or an event; of the longest one what its parts took."""
    taken = [tick for tick in played.ticks if tick.n_effects]
    longest = max(taken, key=lambda tick: tick.total_ms)
    all_ms = np.array([tick.total_ms for tick in taken])
    return {
        "n": len(taken),
        "p50": round(float(np.percentile(all_ms, 50)), 3),
        "p99": round(float(np.percentile(all_ms, 99)), 3),
        "max": round(longest.total_ms, 3),
        "max_deciding": round(longest.deciding_ms, 3),
        "max_starting": round(longest.starting_ms, 3),
    }


def _hits(played: Played, sizes: Sizes) -> dict[str, int]:
    """Tokens by source, over all requests."""
    return {
        source.value: sum(one.pages.get(source.value, 0) for one in played.served)
        * sizes.page_tokens
        for source in SOURCES
    }


def _hit_rate(played: Played, sizes: Sizes) -> float:
    hits = _hits(played, sizes)
    return 1 - hits[Source.PEER.value] / sum(hits.values())


def _hit_rate_ideal(sizes: Sizes) -> float:
    """Whatever has been here before: each earlier prompt and its answer but for the last token."""
    span = sizes.page_tokens
    reusable = sum((n + sizes.n_output - 1) // span for n in sizes.prompt_tokens[:-1])
    return reusable / sum(n // span for n in sizes.prompt_tokens)


def _by_round(ttfts: Mapping[str, float], sizes: Sizes) -> list[float]:
    """Mean milliseconds of each round."""
    means = []
    for number in range(len(sizes.prompt_tokens)):
        of_round = [ttft for rid, ttft in ttfts.items() if rid.endswith(f"r{number}")]
        means.append(round(statistics.mean(of_round) * 1e3, 2))
    return means


def rate_rows(rates: Rates, machine: Machine) -> list[Row]:
    """What was measured before the plays."""
    rows = [
        Row(case="restore-rate", value=round(rates.restore_bytes_s / 1e9, 3), unit="GB/s"),
        Row(case="storage-rate", value=round(rates.storage_bytes_s / 1e9, 3), unit="GB/s"),
        Row(case="step-empty", value=round(rates.step_ms, 4), unit="ms"),
    ]
    for n_tokens, seconds in zip(
        machine.sizes.prompt_tokens, rates.prefill_s_by_round, strict=True
    ):
        note = "of what is new in the round, alone"
        rows.append(Row(case=f"prefill-{n_tokens}", value=round(seconds, 4), unit="s", note=note))
    return rows
