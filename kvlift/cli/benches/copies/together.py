"""Many restores in one submission, and both directions at once."""

import statistics
import time

from kvlift.cli.benches.copies.rates import DEFAULT
from kvlift.cli.benches.copies.recorder import Recorder
from kvlift.cli.benches.copies.setup import (
    DEADLINE_S,
    LAYOUTS,
    Setup,
    check_bytes,
    finish,
    layered_setup,
    new_ticket,
    opened,
)
from kvlift.effects.copies_cuda import CudaCopies
from kvlift.effects.copies_jobs import CopyJob, Direction


def together(bench: Recorder) -> None:
    """Many small restores in one submission: when the first is ready, and what a page costs."""
    for size, n_pages_a_job in (("8MiB", 4), ("1MiB", 4)):
        case = f"restore-together-{size}"
        layout, n_pages = LAYOUTS[size]
        with bench.case(case), layered_setup(layout, n_pages) as setup:
            firsts, totals, cpus = [], [], []
            with opened(setup, DEFAULT) as copies:
                assert isinstance(copies, CudaCopies)
                check_bytes(copies, setup, Direction.RESTORE)
                for _ in range(bench.n_rounds):
                    first_s, total_s, cpu_s = timed_together(copies, setup, n_pages_a_job)
                    firsts.append(first_s)
                    totals.append(total_s)
                    cpus.append(cpu_s)
            bench.add(
                case,
                setup.size_bytes / statistics.median(totals) / 1e9,
                "GB/s",
                n_jobs=n_pages // n_pages_a_job,
                first_ready_ms=statistics.median(firsts) * 1e3,
                all_ready_ms=statistics.median(totals) * 1e3,
                submit_us_a_page=statistics.median(cpus) * 1e6 / n_pages,
            )


def timed_together(
    copies: CudaCopies, setup: Setup, n_pages_a_job: int
) -> tuple[float, float, float]:
    bounds = range(0, len(setup.host_pages), n_pages_a_job)
    jobs = [
        CopyJob(
            new_ticket(),
            Direction.RESTORE,
            setup.host_pages[at : at + n_pages_a_job],
            setup.device_pages[at : at + n_pages_a_job],
        )
        for at in bounds
    ]
    begin, cpu_begin = time.perf_counter(), time.thread_time()
    copies.start_together(jobs)
    cpu_s = time.thread_time() - cpu_begin
    finish_first = len(jobs)
    first_s = 0.0
    end = time.monotonic() + DEADLINE_S
    while finish_first and time.monotonic() < end:
        reports = copies.landed()
        if reports and not first_s:
            first_s = time.perf_counter() - begin
        finish_first -= len(reports)
    if finish_first:
        raise RuntimeError("restores did not land within the deadline")
    return first_s, time.perf_counter() - begin, cpu_s


def duplex(bench: Recorder) -> None:
    """Both directions at once: what each keeps of its own rate."""
    layout, n_pages = LAYOUTS["8MiB"]
    with bench.case("duplex-8MiB"), layered_setup(layout, n_pages) as setup:
        half = n_pages // 2
        times = []
        with opened(setup, DEFAULT) as copies:
            for _ in range(bench.n_rounds + 1):
                begin = time.perf_counter()
                copies.start_restore(
                    new_ticket(), setup.host_pages[:half], setup.device_pages[:half]
                )
                copies.start_mirror(
                    new_ticket(), setup.device_pages[half:], setup.host_pages[half:]
                )
                finish(copies, 2, half)
                times.append(time.perf_counter() - begin)
        wall_s = statistics.median(times[1:])
        bench.add("duplex-8MiB", setup.size_bytes / wall_s / 1e9, "GB/s both ways together")
