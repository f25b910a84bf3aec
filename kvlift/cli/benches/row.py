"""What every bench reports, and how it takes a time."""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
from attrs import frozen


@frozen(kw_only=True)
class Row:
    """One figure. `ceiling` is what it is compared with, in the same unit and the same run; `ratio`
    is value / ceiling. `more`: further fields of its JSON, among them `error` where the case could
    not be measured."""

    case: str
    value: float
    unit: str
    ceiling: float | None = None
    ratio: float | None = None
    note: str = ""
    more: Mapping[str, object] = {}

    @property
    def better(self) -> str:
        """Which way is better: rates are to be high, times to be low."""
        return "higher" if self.unit.startswith("GB/s") else "lower"

    @property
    def error(self) -> str | None:
        """Why there is no figure."""
        error = self.more.get("error")
        return None if error is None else f"not measured: {error}"

    def as_json(self) -> dict[str, object]:
        fields = attrs.asdict(self)
        return {**{name: fields[name] for name in fields if name != "more"}, **self.more}


def row(case: str, value: float, unit: str, ceiling: float | None = None, note: str = "") -> Row:
    """A row with its ratio."""
    return Row(
        case=case,
        value=round(value, 4),
        unit=unit,
        ceiling=None if ceiling is None else round(ceiling, 4),
        ratio=None if not ceiling else round(value / ceiling, 4),
        note=note,
    )


def median_cpu_us(work: Callable[[], object], n_rounds: int) -> float:
    """Median processor time of this thread, in microseconds."""
    spent = []
    for _ in range(n_rounds):
        begin_ns = time.thread_time_ns()
        work()
        spent.append(time.thread_time_ns() - begin_ns)
    return statistics.median(spent) / 1000


def median_wall_us(work: Callable[[], object], n_rounds: int) -> float:
    """Median wall time, in microseconds."""
    spent = []
    for _ in range(n_rounds):
        begin_ns = time.perf_counter_ns()
        work()
        spent.append(time.perf_counter_ns() - begin_ns)
    return statistics.median(spent) / 1000


def machine() -> dict[str, object]:
    """What the figures were taken on; its GPUs where torch is loaded."""
    torch = sys.modules.get("torch")
    gpus: dict[str, object] = {}
    if torch is not None and torch.cuda.is_available():
        n_gpus, name = torch.cuda.device_count(), torch.cuda.get_device_name(0)
        gpus = {
            "gpu": f"{n_gpus} x {name}" if n_gpus > 1 else name,
            "torch": str(torch.__version__),
        }
    return {
        **gpus,
        "processor": _processor(),
        "n_cpus": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
