"""`kvlift doctor`: tries each thing that kvlift needs, with the parts that use it in production."""

import hashlib
import importlib.util
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import click
from attrs import frozen
from rich.markup import escape
from rich.table import Table

from kvlift.cli.output import end, json_option, only_the_answer_on_stdout, print_json, table_console
from kvlift.core.ids import Ticket
from kvlift.core.keys import Namespace
from kvlift.core.landed import Landed, PersistEnded, PrefetchEnded
from kvlift.core.prompt import Prompt, token_bytes

PACKAGES: Final = ("attrs", "transitions", "msgspec", "pyzmq", "click", "rich", "numpy")
EXTRAS: Final = {
    "metrics": ("prometheus_client",),
    "serve": ("starlette", "uvicorn", "tokenizers", "safetensors", "jinja2"),
    "demo": ("matplotlib",),
    "fast": ("zlib_ng",),
    "check": ("hypothesis", "scipy", "coverage"),
    "fuzz": ("atheris",),
}
PAGE_BYTES: Final = 1 << 20
N_PAGES: Final = 8
ANSWER_TIMEOUT_S: Final = 30.0


@frozen(kw_only=True)
class Check:
    """One thing that was tried. Without a `needed` one kvlift does not work here."""

    name: str
    ok: bool
    detail: str
    needed: bool


@frozen
class Trial:
    """`run` says what it found, or raises."""

    name: str
    run: Callable[[], str]
    needed: bool


class Absent(RuntimeError):
    """Something is not there; the message says what that means and what to do."""


def _python() -> str:
    return f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} processors"


def _packages() -> str:
    missing = []
    for name in PACKAGES:
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        raise Absent(f"{', '.join(missing)} missing: pip install kvlift")
    return ", ".join(f"{name} {version(name)}" for name in PACKAGES)


def _torch() -> str:
    import torch

    torch.zeros(8).add_(1)
    return str(torch.__version__)


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        raise Absent("no CUDA device: device pages are kept in plain memory")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"CUDA {torch.version.cuda}: {', '.join(names)}"


def _pinned_memory() -> str:
    import torch

    if not torch.cuda.is_available():
        raise Absent("needs a CUDA device")
    pinned = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    return f"{pinned.numel() >> 20} MiB could be pinned"


def _gb_per_s(copy: Callable[[], object], size_bytes: int) -> float:
    copy()
    n_copies = 8
    started_s = time.perf_counter()
    for _ in range(n_copies):
        copy()
    return size_bytes * n_copies / (time.perf_counter() - started_s) / 1e9


def _copy_bandwidth() -> str:
    import torch

    size_bytes = 64 << 20
    on_gpu = torch.cuda.is_available()
    host = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    if not on_gpu:
        device = torch.empty_like(host)
        return f"memory to memory {_gb_per_s(lambda: device.copy_(host), size_bytes):.1f} GB/s"
    device = torch.empty_like(host, device="cuda")

    def copied(into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    down = _gb_per_s(lambda: copied(device, host), size_bytes)
    up = _gb_per_s(lambda: copied(host, device), size_bytes)
    return f"host to device {down:.1f} GB/s, device to host {up:.1f} GB/s"


def _gloo() -> str:
    from kvlift.effects.ranks_gloo import GlooRanks, join_store, open_store

    n_rounds, launcher = 50, open_store()
    ended: dict[int, str] = {}

    def play(rank: int) -> None:
        store = join_store("127.0.0.1", launcher.port, timeout_s=10)
        ranks = GlooRanks(
            rank, 2, store, deadline_s=5.0, ballot_length=256, group="doctor", join_timeout_s=10
        )
        started_s = time.perf_counter()
        for _ in range(n_rounds):
            ranks.send([rank] * 256)
            if ranks.verdict() != (0,) * 256:
                ended[rank] = "a reduction came out wrong"
                break
        else:
            took_ms = (time.perf_counter() - started_s) / n_rounds * 1e3
            ended[rank] = f"two ranks agree in {took_ms:.2f} ms"
        ranks.close()

    threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    wrong = [text for text in ended.values() if "agree" not in text]
    if len(ended) < 2 or wrong:
        raise Absent(
            f"{wrong[0] if wrong else 'two ranks did not come together'}: check that this host's"
            " name resolves, or name an interface in GLOO_SOCKET_IFNAME (for instance lo)"
        )
    return ended[0]


def _nccl() -> str:
    import torch
    import torch.distributed as dist

    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise Absent("not here: only a host with several GPUs uses it, kvlift itself does not")
    return "available"


def _storage(folder: Path) -> str:
    """Writes pages into a store of its own below `folder`, reads them back, compares SHA-256."""
    from kvlift.effects.host_pool import HostPool
    from kvlift.effects.ports import PageRun
    from kvlift.effects.stores.files import FileStore

    pool = HostPool(2 * N_PAGES, PAGE_BYTES, pinned=False)
    namespace = Namespace(model="doctor", page_tokens=1).digest()
    prompt = Prompt(namespace, token_bytes(list(range(N_PAGES))), 1)
    run = PageRun(prompt, tuple(range(N_PAGES)))
    for page in range(N_PAGES):
        pool.page_view(page)[:] = os.urandom(PAGE_BYTES)
    try:
        place = tempfile.TemporaryDirectory(prefix="kvlift-doctor-", dir=folder)
    except OSError as error:
        raise Absent(
            f"{folder} can't be written to ({error.strerror}): name another with --storage"
        ) from error
    with place as own:
        store = FileStore(own, pool)
        try:
            started_s = time.perf_counter()
            store.start_persist(Ticket(1), run, range(N_PAGES))
            _answered(store.landed, Ticket(1), "write")
            written_s = time.perf_counter()
            store.start_prefetch(Ticket(2), run, range(N_PAGES, 2 * N_PAGES))
            _answered(store.landed, Ticket(2), "read")
            read_s = time.perf_counter()
        finally:
            store.close(deadline_s=5.0)
    if _digest(pool.page_view, 0) != _digest(pool.page_view, N_PAGES):
        raise Absent(f"pages came back changed from {folder}: do not use it as storage")
    size_gb = N_PAGES * PAGE_BYTES / 1e9
    return (
        f"{N_PAGES} pages of {PAGE_BYTES >> 20} MiB came back equal from {folder}"
        f" (write {size_gb / (written_s - started_s):.1f},"
        f" read {size_gb / (read_s - written_s):.1f} GB/s, caches included)"
    )


def _answered(landed: Callable[[], list[Landed]], ticket: Ticket, what: str) -> None:
    give_up_at_s = time.monotonic() + ANSWER_TIMEOUT_S
    while time.monotonic() < give_up_at_s:
        for report in landed():
            if not isinstance(report, PersistEnded | PrefetchEnded) or report.ticket != ticket:
                continue
            if report.n_pages != N_PAGES:
                raise Absent(f"the store could not {what} all pages: is there room for them?")
            return
        time.sleep(0.001)
    raise Absent(f"the store did not {what} {N_PAGES} pages within {ANSWER_TIMEOUT_S:g} s")


def _digest(view: Callable[[int], memoryview], first: int) -> str:
    hasher = hashlib.sha256()
    for page in range(first, first + N_PAGES):
        hasher.update(view(page))
    return hasher.hexdigest()


def _extra(name: str) -> str:
    missing = [part for part in EXTRAS[name] if importlib.util.find_spec(part) is None]
    if missing:
        raise Absent(f"{', '.join(missing)} missing: pip install 'kvlift[{name}]'")
    return ", ".join(EXTRAS[name])


def _needed(name: str, run: Callable[[], str]) -> Trial:
    return Trial(name, run, needed=True)


def _optional(name: str, run: Callable[[], str]) -> Trial:
    return Trial(name, run, needed=False)


def _trials(storage: Path) -> Iterator[Trial]:
    yield _needed("python", _python)
    yield _needed("packages", _packages)
    yield _needed("torch", _torch)
    yield _optional("cuda", _cuda)
    yield _optional("pinned memory", _pinned_memory)
    yield _needed("copy bandwidth", _copy_bandwidth)
    yield _needed("gloo", _gloo)
    yield _optional("nccl", _nccl)
    yield _needed("storage", partial(_storage, storage))
    for name in EXTRAS:
        yield _optional(f"kvlift[{name}]", partial(_extra, name))


def _tried(trial: Trial) -> Check:
    try:
        detail = str(trial.run())
    except (ImportError, OSError, RuntimeError, ValueError, MemoryError) as error:
        detail = " ".join(str(error).split())[:300] or type(error).__name__
        return Check(name=trial.name, ok=False, detail=detail, needed=trial.needed)
    return Check(name=trial.name, ok=True, detail=detail, needed=trial.needed)


def _table(checks: list[Check]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for check in checks:
        word = "[green]ok[/]" if check.ok else "[red]missing[/]" if check.needed else "absent"
        table.add_row(word, escape(check.name), escape(check.detail))
    return table


@click.command()
@click.option(
    "--storage",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=None,
    help="A folder to try as storage. Default: the folder for temporary files.",
)
@json_option
def doctor(*, storage: Path | None, as_json: bool) -> None:
    """Say what works on this machine, and how to get what is missing.

    Exit code 1 if something is missing that kvlift cannot do without.

    Example: kvlift doctor --storage /mnt/nvme
    """
    folder = storage or Path(tempfile.gettempdir())
    with only_the_answer_on_stdout(as_json=as_json):
        checks = [_tried(trial) for trial in _trials(folder)]
    if as_json:
        print_json({"checks": checks})
    else:
        table_console().print(_table(checks))
    end(holds=all(check.ok for check in checks if check.needed))
