"""`kvlift plan`: how much cache a trace needs, asked of the real core in simulated time."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
from rich import box
from rich.bar import Bar
from rich.table import Table

from kvlift.cli.finite import Finite
from kvlift.cli.output import fail, json_option, print_json, progress_bar, table_console
from kvlift.runtime.demo.trace import TraceError, read_trace
from kvlift.testing.plan.run import Row, planned
from kvlift.testing.plan.sizes import GIB, PlanRefused, Rates, Sizes, grid

N_REQUESTS: Final = 1000
ROWS_MAX: Final = 100
GIB_MAX: Final = 1 << 20


def _sizes(_ctx: click.Context, _param: click.Parameter, text: str) -> list[float]:
    """`16,64`: GiB, one or several."""
    try:
        sizes = [float(word) for word in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of GiB such as 16,64") from None
    if any(not math.isfinite(size) or not 0 <= size <= GIB_MAX for size in sizes):
        raise click.BadParameter(f"a size must be from 0 to {GIB_MAX} GiB")
    return sizes


RATE: Final = Finite(min=0.001, max=1e9)
GIBS: Final = "GIB[,GIB...]"


@click.command(
    epilog="Example: kvlift plan --trace trace.jsonl --host-gib 0,64,256 --storage-gib 0,2048",
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help="A Mooncake-format trace: timestamps, lengths, hashes of blocks of 512 tokens.",
)
@click.option("--device-gib", default="40", metavar=GIBS, callback=_sizes, help="Of each node.")
@click.option("--host-gib", default="0,128", metavar=GIBS, callback=_sizes, help="Of each node.")
@click.option(
    "--storage-gib", default="0,2048", metavar=GIBS, callback=_sizes, help="Shared by all nodes."
)
@click.option("--nodes", type=click.IntRange(1, 64), default=1, help="Decode nodes.")
@click.option(
    "--kv-bytes-per-token",
    type=click.IntRange(1, 1 << 30),
    default=131_072,
    help="Over all layers: 131072 is a model of 8 billion parameters with 8 KV heads in 16 bits.",
)
@click.option("--link-gbps", type=RATE, default=100.0, help="Gbit/s from prefill into a node.")
@click.option("--storage-gbps", type=RATE, default=50.0, help="Gbit/s between storage and a node.")
@click.option("--copy-gbps", type=RATE, default=400.0, help="Gbit/s between host and device.")
@click.option(
    "--prefill-tokens-per-s", type=RATE, default=20_000.0, help="Of one prompt on a prefill node."
)
@click.option("--step-ms", type=RATE, default=20.0, help="One decode step.")
@click.option("--batch", type=click.IntRange(1, 10_000), default=64, help="Running on a node.")
@click.option(
    "--requests", type=click.IntRange(1, 10_000_000), default=N_REQUESTS, help="Of the trace."
)
@json_option
def plan(
    *,
    trace: Path,
    device_gib: list[float],
    host_gib: list[float],
    storage_gib: list[float],
    nodes: int,
    kv_bytes_per_token: int,
    link_gbps: float,
    storage_gbps: float,
    copy_gbps: float,
    prefill_tokens_per_s: float,
    step_ms: float,
    batch: int,
    requests: int,
    as_json: bool,
) -> None:
    """Plan capacity: play a trace in simulated time through the real core, for each size.

    Sizes are lists; every combination is a row: hits by tier, time to first token, traffic.
    Prefill is not what is planned: it is never full, and what it has computed once it still has.
    A block of 512 tokens is a page. Answers are cached, but a trace does not say who reuses them.
    """
    rates = Rates(
        kv_bytes_per_token=kv_bytes_per_token,
        link_gbps=link_gbps,
        storage_gbps=storage_gbps,
        copy_gbps=copy_gbps,
        prefill_tokens_per_s=prefill_tokens_per_s,
        step_ms=step_ms,
        n_batch_max=batch,
    )
    sizes = grid(device_gib, host_gib, storage_gib)
    if len(sizes) > ROWS_MAX:
        fail(f"these lists make {len(sizes)} rows, at most {ROWS_MAX}: give shorter ones")
    try:
        rows = _rows(trace, requests, sizes, rates, nodes)
    except (TraceError, PlanRefused) as error:
        fail(str(error))
    if as_json:
        print_json({"trace": str(trace), "nodes": nodes, "rows": [row.as_json() for row in rows]})
    else:
        _print(rows, nodes)


def _rows(
    trace: Path, n_requests: int, sizes: Sequence[Sizes], rates: Rates, n_nodes: int
) -> list[Row]:
    found = read_trace(trace, n_requests)
    rows: list[Row] = []
    with progress_bar() as bar:
        task = bar.add_task("requests", total=len(found) * len(sizes))
        for size in sizes:
            n_before = len(found) * len(rows)

            def show(n_over: int, n_before: int = n_before) -> None:
                bar.update(task, completed=n_before + n_over)

            rows.append(planned(found, size, rates, n_nodes, show))
    return rows


def _nodes(n_nodes: int) -> str:
    return "1 decode node" if n_nodes == 1 else f"{n_nodes} decode nodes"


def _print(rows: Sequence[Row], n_nodes: int) -> None:
    """Shares of prompt tokens by tier, times to first token, traffic; and a plot of the sums."""
    table = Table(
        title=f"{rows[0].n_requests} requests, {_nodes(n_nodes)}: prompt tokens by where they come"
        " from, seconds to the first token, GiB from prefill",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
        padding=0,
    )
    table.add_column("GiB", no_wrap=True)
    for name in ("device", "host", "storage", "all", "mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right", no_wrap=True, min_width=6)
    table.add_column("prefill", justify="right", no_wrap=True, min_width=7)
    plot = Table.grid(padding=(0, 1))
    slowest = max([1e-9, *(row.ttft_s["mean"] for row in rows)])
    plot.add_row("", "tokens from the cache, 0 to 100 %", "mean TTFT")
    for row in rows:
        size = row.sizes
        gib = f"{size.device_gib:g}/{size.host_gib:g}/{size.storage_gib:g}"
        hits = [*row.hit.values(), sum(row.hit.values())]
        table.add_row(
            gib,
            *(f"{share:.1%}" for share in hits),
            *(f"{seconds:.2f}" for seconds in row.ttft_s.values()),
            f"{row.peer_bytes / GIB:.0f}",
        )
        plot.add_row(
            gib,
            Bar(1.0, 0.0, min(1.0, hits[-1]), width=34),
            Bar(slowest, 0.0, row.ttft_s["mean"], width=24),
        )
    console = table_console()
    console.print(table)
    console.print(plot)
    for line in _remarks(rows):
        console.print(line)


def _remarks(rows: Sequence[Row]) -> list[str]:
    """What did not fit, a line a size of device: the other tiers have no part in it."""
    said: dict[tuple[float, int, int], str] = {}
    for row in rows:
        if row.n_refused or row.n_failed:
            gib = row.sizes.device_gib
            said[gib, row.n_refused, row.n_failed] = (
                f"{gib:g} GiB of device: {row.n_refused} requests are larger than that and were"
                f" refused, {row.n_failed} failed"
            )
    return list(said.values())
