"""What this machine must have before a cluster is started, said in a sentence where it has not.

Memory is asked for in one piece and handed out by the kernel page by page, so tiers that are too
large may start and be killed hours later. Here they are refused at once.
"""

import os
from pathlib import Path
from typing import Final

from kvlift.runtime.worker.settings import WorkerSettings

GIB: Final = 1 << 30
CGROUP_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def memory_bytes() -> int:
    """What this process and its children may use together: the machine's, or the container's."""
    least = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in CGROUP_LIMITS:
        try:
            least = min(least, int(path.read_text()))
        except (OSError, ValueError):
            continue  # no such limit, or "max"
    return least


def memory_fault(settings: WorkerSettings, page_bytes: int, there_bytes: int) -> str | None:
    """`page_bytes`: of a page of all ranks together."""
    host_bytes = settings.host_pages * page_bytes
    device_bytes = settings.device_pages * page_bytes if settings.device == "cpu" else 0
    if settings.role == "prefill" or host_bytes + device_bytes <= there_bytes:
        return None
    what = f"{settings.host_pages} host pages of {page_bytes} bytes"
    advice = "lower --host-pages"
    if device_bytes:
        what += f" and {settings.device_pages} device pages (on the CPU)"
        advice += " or --device-pages"
    needed = (host_bytes + device_bytes) / GIB
    return (
        f"{what} need {needed:.1f} GiB of memory, there are {there_bytes / GIB:.1f} GiB here: "
        f"{advice} (host_pages, device_pages)"
    )


def device_fault(settings: WorkerSettings) -> str | None:
    if settings.device != "cuda":
        return None
    import torch

    if torch.cuda.is_available():
        return None
    built = "" if torch.version.cuda else f", and torch {torch.__version__} is built without CUDA"
    return (
        f"torch finds no CUDA device here{built}: serve with --device cpu, or see "
        "what `kvlift doctor` says about cuda"
    )
