"""Worlds in processes of their own."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlift.models.explore import Progress
from kvlift.models.jobs import Jobs, WorkerFailed
from kvlift.models.worker import Job, Result

REGISTRY = """
from kvlift.models.claim import Always, Move, Share, Sometimes, World

class Line(World[int]):
    def __init__(self, n):
        self.name, self.n = f"line {n}", n
    def claims(self):
        return (Always("below 3", lambda n: n < 3), Sometimes("at 2", lambda n: n == 2),
                Sometimes("at 99", lambda n: n == 99),
                Share("even", lambda n: 1, lambda n: n % 2 == 0))
    def initial(self):
        return [0]
    def moves(self, state):
        if state < self.n:
            yield Move("on", state + 1)
    def canonical(self, state):
        return state
    def story_preamble(self):
        return "world ranks=1"
    def edges_taken(self):
        return ["line: A --E--> B"]

def raises(*, deep):
    raise OSError("no such place")

WORLDS = {
    "short": lambda *, deep: Line(7 if deep else 2),
    "endless": lambda *, deep: Line(10**9),
    "raises": raises,
}
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "worlds_of_this_test.py").write_text(REGISTRY)
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    return "worlds_of_this_test"


def results_of(*jobs: Job) -> Iterator[Result]:
    results: list[Result] = []
    with Jobs(2, lambda _job, _progress: None) as running:
        running.run(jobs, lambda _job, result: results.append(result))
    return iter(results)


def test_a_job_comes_back_with_counts_and_stories(registry: str) -> None:
    short, deep = results_of(
        Job(world="short", registry=registry), Job(world="short", registry=registry, deep=True)
    )
    assert (short.n_states, short.n_transitions, short.depth, short.complete) == (3, 2, 2, True)
    assert short.always == {"nothing raises": None, "below 3": None}
    assert short.sometimes == {"at 2": True, "at 99": False}
    assert short.shares == {"even": (2, 3)}
    assert short.edges_taken == {"line: A --E--> B"}
    assert short.branches is None
    assert short.n_broken == 1
    assert deep.always["below 3"] == "# below 3\nworld ranks=1\non\non\non\n"
    assert deep.n_broken == 2


def test_branches_are_measured_on_request(registry: str) -> None:
    pytest.importorskip("coverage")
    (result,) = results_of(Job(world="short", registry=registry, measures_branches=True))
    assert result.branches is not None
    assert result.branches.fraction == 0.0  # this world leaves the core alone
    assert len(result.branches.known) > 100
    assert result.n_states == 3


def test_progress_is_heard_and_a_limit_ends_a_job(registry: str) -> None:
    heard: list[tuple[str, Progress]] = []
    results: dict[str, Result] = {}
    job = Job(world="endless", registry=registry, seconds_max=0.7)
    with Jobs(1, lambda job, progress: heard.append((job.world, progress))) as running:
        running.run([job], lambda job, result: results.update({job.world: result}))
    assert not results["endless"].complete
    assert results["endless"].n_broken == 1  # "below 3"; a goal may lie beyond the limit
    assert [world for world, _ in heard][:1] == ["endless"]


def test_a_worker_that_fails_says_why_and_ends_the_others(registry: str) -> None:
    jobs = [Job(world="raises", registry=registry), Job(world="endless", registry=registry)]
    with pytest.raises(WorkerFailed, match="world raises was not explored: OSError: no such"):
        list(results_of(*jobs))


def test_an_interrupt_ends_the_search_and_keeps_what_it_has(registry: str) -> None:
    results: list[Result] = []
    sent: list[str] = []

    def on_progress(job: Job, _progress: Progress) -> None:
        if not sent:
            sent.append(job.world)
            os.kill(os.getpid(), signal.SIGINT)

    jobs = [Job(world="endless", registry=registry), Job(world="short", registry=registry)]
    with Jobs(1, on_progress) as running:
        running.run(jobs, lambda _job, result: results.append(result))
    (result,) = results  # the second world was not begun
    assert running.interrupted.is_set()
    assert (result.world, result.complete) == ("endless", False)
    assert result.n_states > 100
    assert result.rss_bytes > 1_000_000
