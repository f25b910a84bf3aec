"""The double that `tests/hosts` runs kvlift in makes the calls that the real engine makes.

Both are played the same requests; what is compared is which method follows which within a step.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.hosts.vllm_double import PAGE_BYTES, Engine, Request
from tests.hosts.vllm_stand_in import connector_class
from tests.vllm.harness_engine import engine
from tests.vllm.test_engine_alone import drawn

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

OF_SCHEDULER = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "take_events",
)
OF_WORKER = (
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)


def steps(calls: Sequence[str], names: Sequence[str]) -> list[tuple[str, ...]]:
    """The calls of each step, those of `names`; a run of one name counts once."""
    found: list[list[str]] = [[]]
    for call in calls:
        if call == "--":
            found.append([])
        elif call in names and (not found[-1] or found[-1][-1] != call):
            found[-1].append(call)
    return [tuple(step) for step in found[1:]]


def kinds(made: list[tuple[str, ...]]) -> set[tuple[str, ...]]:
    """Arrivals fall between steps, wherever they come from."""
    return {tuple(name for name in step if name != "on_new_request") for step in made}


def test_the_double_makes_the_calls_of_the_real_engine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (*OF_SCHEDULER, *OF_WORKER)
    store = str(tmp_path / "real")
    with engine("calls", model, tmp_path, "kv_both", host_bytes=8 << 20, storage=store) as real:
        real.wait_ready()
        real.do("record", names=list(names))
        first = drawn(1, 700)
        for _ in range(2):
            real.ask(first, n_tokens=4)
            real.quiet()
            real.do("reset")
        by_real = steps(real.do("record", taken=True)["calls"], names)

    known = connector_class(monkeypatch)
    extra = {"host_bytes": 40 * PAGE_BYTES, "storage": str(tmp_path / "double")}
    double = Engine(known, "kv_both", extra)
    worker = double.workers[0]
    worker.log = double.log  # one sequence, as the real one is recorded
    try:
        for n in range(2):
            double.add(Request(f"r{n}", drawn(1, 30), 4))
            while double.has_requests():
                double.step()
            assert double.pool.reset()
    finally:
        double.close()
    by_double = steps(double.log, names)

    assert kinds(by_real) - kinds(by_double) == set()
    assert kinds(by_double) - kinds(by_real) == set()
    assert any("get_num_new_matched_tokens" in step for step in by_real)
    loads = [step for step in by_real if "update_state_after_alloc" in step]
    assert len(loads) == len([step for step in by_double if "update_state_after_alloc" in step])
