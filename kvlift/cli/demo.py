"""`kvlift demo`: the main job, played in several modes and compared."""

import functools
import importlib.util
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from attrs import frozen

from kvlift.cli.finite import Finite
from kvlift.cli.output import (
    end,
    fail,
    json_option,
    only_the_answer_on_stdout,
    print_json,
    progress_bar,
    say,
    table_console,
)

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvlift.runtime.demo.compare import Comparison
    from kvlift.runtime.demo.play import ModeRun, Setup
    from kvlift.runtime.demo.result import DemoResult
    from kvlift.runtime.demo.workload import Workload

LINK_GBPS: Final = 0.02
"""So slow that sending the tiny model's KV takes longer than computing it, as with real ones."""

MODE_NAMES: Final = ("none", "device", "host", "all")


@frozen(kw_only=True)
class Wanted:
    """The command line, parsed."""

    n_ranks: int
    n_conversations: int
    n_rounds: int
    device: str
    model: str
    trace: Path | None
    n_requests: int
    scale: float
    link_gbps: float
    modes: tuple[str, ...]
    out: Path
    corrupts: bool
    seed: int


def _modes(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[str, ...]:
    asked = [mode.strip() for mode in value.split(",")]
    strange = [mode for mode in asked if mode not in MODE_NAMES]
    if strange:
        raise click.BadParameter(
            f"{strange[0]!r} is no mode; choose from {','.join(MODE_NAMES)}, separated by commas"
        )
    return tuple(mode for mode in MODE_NAMES if mode in asked)


@click.command(
    epilog="Example: kvlift demo --conversations 4 --rounds 6 --out ./out/demo",
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.option("--ranks", "n_ranks", type=click.IntRange(1, 64), default=2, help="Decode ranks.")
@click.option("--conversations", "n_conversations", type=click.IntRange(1, 1024), default=4)
@click.option("--rounds", "n_rounds", type=click.IntRange(2, 256), default=6, help="Turns of each.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="For the model.")
@click.option(
    "--model", default="tiny", help="`tiny`, or a Hugging Face folder; computed in float32."
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Play a Mooncake-format trace in place of conversations.",
)
@click.option(
    "--requests",
    "n_requests",
    type=click.IntRange(2, 100_000),
    help="Of the trace, the first; 60 where it is left out.",
)
@click.option(
    "--scale",
    type=Finite(0, 1, min_open=True),
    help="Factor on the trace's lengths; 0.01 where it is left out.",
)
@click.option(
    "--link-gbps",
    type=Finite(0, 10_000),
    default=LINK_GBPS,
    help="Slow the link from prefill down to so many Gbit/s; 0 leaves it alone.",
)
@click.option(
    "--modes",
    default=",".join(MODE_NAMES),
    callback=_modes,
    help="Which to play, separated by commas; `host` is device+host.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("out/demo"),
    help="Folder of the report.",
)
@click.option(
    "--corrupt-one-page",
    "corrupts",
    is_flag=True,
    help="Spoil one restored page on the device of one rank: the comparison must notice (exit 1).",
)
@click.option("--seed", type=int, default=0, help="Of the tokens, and of the tiny model's weights.")
@json_option
def demo(*, as_json: bool, **options: Any) -> None:
    """Play multi-turn conversations over all tiers in real processes, and compare.

    A prefill process and the decode ranks are started anew for each mode and play the same requests
    over the same link. Device and host are flushed half way, in every mode.

    \b
    none    nothing is reused: decode's device forgets its cache before each request
    device  KV is kept on the device only
    host    device and host
    all     device, host and file storage, in a temporary folder

    Prefill keeps a prefix cache of its own in every mode, so that modes differ in what is sent and
    not in what is computed. Tokens and log-probabilities are compared with a plain forward without
    any cache, and restored pages with recomputed ones.
    """
    wanted = _parsed(options)
    if importlib.util.find_spec("matplotlib") is None:
        fail("the report needs matplotlib: pip install 'kvlift[demo]'")
    if wanted.corrupts and not {"host", "all"} & set(wanted.modes):
        raise click.UsageError(
            "--corrupt-one-page needs a mode that restores pages: add host or all to --modes"
        )
    with (
        only_the_answer_on_stdout(as_json=as_json),
        tempfile.TemporaryDirectory(prefix="kvlift-model-") as folder,
    ):
        result, path = _played(wanted, Path(folder))
    if as_json:
        print_json(result)
    else:
        _print_tables(result)
    say(f"report: {path}")
    for fault in result.faults:
        say(f"does not hold: {fault}")
    end(holds=not result.faults)


def _parsed(options: dict[str, Any]) -> "Wanted":
    """Options that belong to a trace are refused without one, and have their defaults with one."""
    if options["trace"] is None:
        for name, value in (("--requests", options["n_requests"]), ("--scale", options["scale"])):
            if value is not None:
                raise click.UsageError(f"{name} is of a trace: name one with --trace FILE")
    n_requests, scale = options.pop("n_requests"), options.pop("scale")
    return Wanted(n_requests=n_requests or 60, scale=scale or 0.01, **options)


@contextmanager
def _sentences() -> Iterator[None]:
    """What cannot be played or started becomes one sentence and exit code 2."""
    from kvlift.runtime.demo.workload import DemoRefused
    from kvlift.runtime.worker.generation import EngineDownError
    from kvlift.runtime.worker.launch import ClusterRefusedError
    from kvlift.runtime.worker.model_config import ModelRefusedError

    try:
        yield
    except (DemoRefused, ClusterRefusedError, ModelRefusedError, EngineDownError) as error:
        fail(str(error))


def _played(wanted: Wanted, folder: Path) -> "tuple[DemoResult, Path]":
    """Everything, from the call to the written report."""
    started_s = time.monotonic()
    try:
        wanted.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted.out):
            pass  # Told now, and not after minutes of playing.
    except OSError as error:
        fail(f"cannot write to {wanted.out} ({error.strerror}); choose another --out")
    with _sentences():
        setup = _setup(wanted, folder)
        say(_announcement(setup, wanted))
        with progress_bar() as bar:
            runs = _runs(setup, wanted, bar)
            compared = _compared(setup, runs, bar)
    return _reported(setup, wanted, runs, compared, time.monotonic() - started_s)


def _setup(wanted: Wanted, folder: Path) -> "Setup":
    from kvlift.runtime.demo.float32 import in_float32
    from kvlift.runtime.demo.play import Setup
    from kvlift.runtime.demo.workload import DemoRefused
    from kvlift.runtime.worker.loading import ModelSource

    _check_device(wanted.device)
    config = ModelSource(wanted.model).config()
    config.fits_ranks(wanted.n_ranks)
    workload = _workload(wanted, config.vocab, config.positions_max)
    sizes = workload.sizes()
    if sizes.request_tokens_most > config.positions_max:
        raise DemoRefused(
            f"the longest request has {sizes.request_tokens_most} tokens, the model takes "
            f"{config.positions_max}; play fewer --rounds, or scale the trace down"
        )
    return Setup(
        n_ranks=wanted.n_ranks,
        model=in_float32(wanted.model, folder),
        seed=wanted.seed,
        device=wanted.device,
        link_gbps=wanted.link_gbps,
        workload=workload,
        sizes=sizes,
    )


def _check_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        fail("torch finds no CUDA device here; leave --device cuda out, or see `kvlift doctor`")


def _workload(wanted: Wanted, vocab: int, positions_max: int) -> "Workload":
    from kvlift.runtime.demo.trace import trace_workload
    from kvlift.runtime.demo.workload import conversations

    if wanted.trace is None:
        return conversations(
            n_conversations=wanted.n_conversations,
            n_rounds=wanted.n_rounds,
            vocab=vocab,
            seed=wanted.seed,
        )
    return trace_workload(
        wanted.trace,
        n_requests=wanted.n_requests,
        scale=wanted.scale,
        vocab=vocab,
        positions_max=positions_max,
        seed=wanted.seed,
    )


def _announcement(setup: "Setup", wanted: Wanted) -> str:
    link = f"a link of {setup.link_gbps:g} Gbit/s" if setup.link_gbps else "a link as fast as it is"
    damage = "; one restored page will be spoilt, as asked" if wanted.corrupts else ""
    return (
        f"{setup.workload.what} over {link}, {setup.n_ranks} decode ranks, "
        f"pages of {setup.workload.page_tokens} tokens, {setup.sizes.device_pages} on the device"
        f"{damage}"
    )


def _runs(setup: "Setup", wanted: Wanted, bar: "Progress") -> "list[ModeRun]":
    from kvlift.runtime.demo.play import RESTORING, play

    spoilt = [mode for mode in wanted.modes if mode in RESTORING][-1:] if wanted.corrupts else []
    runs = []
    n_turns = len(setup.workload.turns)
    for mode in wanted.modes:
        started_s = time.monotonic()
        task = bar.add_task(f"mode {mode}", total=n_turns)
        step = functools.partial(bar.advance, task)
        runs.append(play(setup, mode, damages=mode in spoilt, on_answer=step))
        say(f"mode {mode}: {n_turns} requests in {time.monotonic() - started_s:.0f} s")
    return runs


def _compared(setup: "Setup", runs: "list[ModeRun]", bar: "Progress") -> "Comparison":
    import torch

    from kvlift.runtime.demo.compare import compare
    from kvlift.runtime.worker.loading import ModelSource

    source = ModelSource(setup.model, setup.seed)
    if source.is_tiny:
        # On busy cores more threads than one wait for each other longer than they compute.
        torch.set_num_threads(1)
    decoder = source.decoder(device=setup.device)
    task = bar.add_task("plain forward", total=sum(len(run.played) for run in runs))
    return compare(runs, decoder, lambda: bar.advance(task))


def _reported(
    setup: "Setup",
    wanted: Wanted,
    runs: "list[ModeRun]",
    compared: "Comparison",
    seconds: float,
) -> "tuple[DemoResult, Path]":
    from kvlift.runtime.demo.page import write_report
    from kvlift.runtime.demo.result import result_of

    def judged(faults: list[str], n_damaged: int) -> list[str]:
        if not wanted.corrupts:
            return faults
        if n_damaged != 1:
            return [*faults, f"{n_damaged} pages were spoilt in place of 1: play more rounds"]
        if not faults:
            return ["a page was spoilt, as asked, and no comparison has noticed: that is a bug"]
        return ["a restored page was spoilt, as asked with --corrupt-one-page", *faults]

    result = result_of(
        setup,
        runs,
        compared,
        model=wanted.model,
        machine=_machine(wanted.device),
        seconds=seconds,
        judged=judged,
    )
    try:
        path = write_report(result, runs[-1].timeline, wanted.out)
    except OSError as error:
        fail(f"cannot write the report to {wanted.out} ({error.strerror}); choose another --out")
    return result, path


def _machine(device: str) -> str:
    import torch

    words = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    if device == "cuda":
        words += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{words}, Python {platform.python_version()}, torch {torch.__version__}"


def _print_tables(result: "DemoResult") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from kvlift.runtime.demo.page import CAPTION, proofs_of, setting_of, short_rows

    console = table_console()
    console.print(f"{result.workload}; {setting_of(result)}")
    console.print(f"{result.machine}; {result.seconds:.0f} s")
    heading, *rows = short_rows(result)
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 0))
    for name in heading:
        table.add_column(name, justify="left" if name == heading[0] else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(CAPTION)
    proofs = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for what, came_out in proofs_of(result):
        proofs.add_row(what, came_out)
    console.print(proofs)
