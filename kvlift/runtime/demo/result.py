"""The numbers of a demo, shaped as scripts read them, and sentences about what does not hold."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from kvlift.runtime.demo.compare import LOGPROB_DIFF_MAX, Comparison
from kvlift.runtime.demo.play import RESTORING, ModeRun, Played, Setup

TIERS: Final = ("device", "host", "storage")
FAULTS_TOLD: Final = 3


class TtftMs(msgspec.Struct, frozen=True):
    """Time to first token; None where nothing was answered."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class TpotMs(msgspec.Struct, frozen=True):
    """Time per output token after the first, of requests that have more than one."""

    mean: float | None
    p90: float | None


class Hits(msgspec.Struct, frozen=True):
    """Prompt tokens by where their KV came from."""

    device: int
    host: int
    storage: int
    peer: int


class ModeNumbers(msgspec.Struct, frozen=True):
    ttft_ms: TtftMs
    tpot_ms: TpotMs
    hit: Hits
    bytes_from_peer: int
    requests: int
    failed: int


class Change(msgspec.Struct, frozen=True):
    """Fractions against mode `none`, negative is better; None where one of both is missing."""

    ttft_mean: float | None = None
    ttft_p90: float | None = None
    ttft_p99: float | None = None
    tpot_mean: float | None = None


class RoundNumbers(msgspec.Struct, frozen=True):
    """`is_after_flush`: device and host have forgotten everything since the first round."""

    round: int
    mode: str
    ttft_ms_mean: float | None
    hit: Hits
    requests: int
    is_after_flush: bool


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """`change_vs_none` is of the last mode played, `all` by default. `pages_verified` and
    `pages_wrong` count each rank's part of a page. `faults`: what does not hold, as sentences."""

    modes: dict[str, ModeNumbers]
    change_vs_none: Change
    change_vs_none_by_mode: dict[str, Change]
    tokens_identical: bool
    logprob_diff_max: float
    pages_verified: int
    pages_wrong: int
    pages_damaged: int
    kv_diff_max: float
    ballots_per_tick_max: int
    leaks: int
    rounds: list[RoundNumbers]
    workload: str
    link_gbps: float
    ranks: int
    device: str
    model: str
    seed: int
    machine: str
    seconds: float
    faults: list[str]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _percentile(values: Sequence[float], percent: int) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def hits_of(played: Iterable[Played]) -> Hits:
    whole = [one for one in played if not one.fault]
    return Hits(
        device=sum(one.cached.device for one in whole),
        host=sum(one.cached.host for one in whole),
        storage=sum(one.cached.storage for one in whole),
        peer=sum(one.n_tokens_from_peer for one in whole),
    )


def numbers_of(run: ModeRun) -> ModeNumbers:
    whole = [one for one in run.played if not one.fault]
    ttft = [one.ttft_s * 1000 for one in whole]
    tpot = [one.tpot_s * 1000 for one in whole if one.tpot_s is not None]
    return ModeNumbers(
        ttft_ms=TtftMs(
            mean=_mean(ttft),
            p50=_percentile(ttft, 50),
            p90=_percentile(ttft, 90),
            p99=_percentile(ttft, 99),
        ),
        tpot_ms=TpotMs(mean=_mean(tpot), p90=_percentile(tpot, 90)),
        hit=hits_of(run.played),
        bytes_from_peer=sum(rank["bytes_from_peer"] for rank in run.ranks),
        requests=len(run.played),
        failed=len(run.played) - len(whole),
    )


def change_of(mode: ModeNumbers, none: ModeNumbers | None) -> Change:
    if none is None:
        return Change()

    def fraction(value: float | None, base: float | None) -> float | None:
        return value / base - 1 if value is not None and base else None

    return Change(
        ttft_mean=fraction(mode.ttft_ms.mean, none.ttft_ms.mean),
        ttft_p90=fraction(mode.ttft_ms.p90, none.ttft_ms.p90),
        ttft_p99=fraction(mode.ttft_ms.p99, none.ttft_ms.p99),
        tpot_mean=fraction(mode.tpot_ms.mean, none.tpot_ms.mean),
    )


def rounds_of(run: ModeRun, n_rounds: int, after: frozenset[int]) -> list[RoundNumbers]:
    rounds = []
    for number in range(1, n_rounds + 1):
        played = [one for one in run.played if one.turn.round_number == number]
        ttft = [one.ttft_s * 1000 for one in played if not one.fault]
        rounds.append(
            RoundNumbers(
                round=number,
                mode=run.mode,
                ttft_ms_mean=_mean(ttft),
                hit=hits_of(played),
                requests=len(played),
                is_after_flush=number in after,
            )
        )
    return rounds


def leaks_of(run: ModeRun) -> int:
    """Pages and pins that nobody should hold, and pages that no count explains, on all ranks."""
    n_leaks = 0
    for rank in run.ranks:
        n_leaks += (rank["leaks"] or 0) + rank["n_pins"] + rank["n_tickets"]
        n_leaks += abs(run.device_pages - sum(rank["device"].values()))
        n_leaks += abs(run.host_pages - sum(rank["host"].values()))
    return n_leaks


def faults_of(runs: Sequence[ModeRun], compared: Comparison) -> list[str]:
    """What does not hold, as sentences; whether a damaged page was found is not judged here."""
    faults: list[str] = []
    for run in runs:
        faults += _faults_of_run(run)
    restoring = [run for run in runs if run.mode in RESTORING]
    n_verified = _total(restoring, "pages_verified")
    n_wrong = _total(runs, "pages_wrong")
    if restoring and n_verified == 0 and not any(run.fault for run in restoring):
        faults.append("no page was restored, so none was compared; play more rounds")
    if n_wrong:
        faults.append(f"{n_wrong} of {n_verified} restored pages differ from recomputed ones")
    if not compared.tokens_identical:
        told = "; ".join(compared.differences) or "nothing was answered"
        faults.append(f"the tokens are not identical: {told}")
    if not compared.logprob_diff_max <= LOGPROB_DIFF_MAX:
        faults.append(
            f"log-probabilities differ by {compared.logprob_diff_max:.2g} from a plain forward's, "
            f"the limit is {LOGPROB_DIFF_MAX:g}"
        )
    return faults


def _faults_of_run(run: ModeRun) -> list[str]:
    faults = []
    failed = [one.fault for one in run.played if one.fault]
    if failed:
        told = "; ".join(failed[:FAULTS_TOLD])
        faults.append(f"mode {run.mode}: {len(failed)} requests failed: {told}")
    hits = hits_of(run.played)
    if run.mode == "none" and hits.device + hits.host + hits.storage:
        faults.append("mode none: something was reused, so it is no yardstick")
    if run.mode == "all" and not hits.storage:
        faults.append("mode all: nothing came from storage after the flush")
    if run.fault:
        return [*faults, f"mode {run.mode} ended early: {run.fault}"]
    if not run.has_rested:
        faults.append(f"mode {run.mode}: work was still under way a minute after the last answer")
    n_leaks = leaks_of(run)
    if n_leaks:
        faults.append(f"mode {run.mode}: {n_leaks} pages, pins or tickets leaked")
    if (most := max(rank["ballots_per_tick_max"] for rank in run.ranks)) > 1:
        faults.append(f"mode {run.mode}: {most} ballots in one tick")
    return faults


def _total(runs: Sequence[ModeRun], name: str) -> int:
    return sum(rank[name] for run in runs for rank in run.ranks)


def result_of(
    setup: Setup,
    runs: Sequence[ModeRun],
    compared: Comparison,
    *,
    model: str,
    machine: str,
    seconds: float,
    judged: Callable[[list[str], int], list[str]],
) -> DemoResult:
    """`judged` gets the faults and the number of damaged pages and gives the faults to tell."""
    modes = {run.mode: numbers_of(run) for run in runs}
    none = modes.get("none")
    changes = {mode: change_of(numbers, none) for mode, numbers in modes.items() if mode != "none"}
    workload = setup.workload
    n_damaged = _total(runs, "pages_damaged")
    ranks: list[dict[str, Any]] = [rank for run in runs for rank in run.ranks]
    return DemoResult(
        modes=modes,
        change_vs_none=changes[runs[-1].mode] if runs[-1].mode in changes else Change(),
        change_vs_none_by_mode=changes,
        tokens_identical=compared.tokens_identical,
        logprob_diff_max=compared.logprob_diff_max,
        pages_verified=_total(runs, "pages_verified"),
        pages_wrong=_total(runs, "pages_wrong"),
        pages_damaged=n_damaged,
        kv_diff_max=max((rank["kv_diff_max"] for rank in ranks), default=0.0),
        ballots_per_tick_max=max((rank["ballots_per_tick_max"] for rank in ranks), default=0),
        leaks=sum(leaks_of(run) for run in runs),
        rounds=[
            row
            for run in runs
            for row in rounds_of(run, workload.n_rounds, workload.rounds_after_flush)
        ],
        workload=workload.what,
        link_gbps=setup.link_gbps,
        ranks=setup.n_ranks,
        device=setup.device,
        model=model,
        seed=setup.seed,
        machine=machine,
        seconds=seconds,
        faults=judged(faults_of(runs, compared), n_damaged),
    )
