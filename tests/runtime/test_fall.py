"""Which rank's words say why a worker is down, when all its ranks end within a moment."""

import asyncio
from typing import cast

import pytest

from kvlift.core.ballot import RankFailed, RanksDiverged
from kvlift.effects.ports import RankLate, RankLost
from kvlift.runtime.worker import launch
from kvlift.runtime.worker.child import is_anothers
from kvlift.runtime.worker.children import Child
from kvlift.runtime.worker.front import RemoteEngine
from kvlift.runtime.worker.launch import Cluster
from kvlift.runtime.worker.settings import WorkerSettings


class Ended:
    """A rank that is over."""

    def __init__(self, *, followed_another: bool) -> None:
        self.followed_another = followed_another


def failed(cause: Exception | None) -> RankFailed:
    error = RankFailed(7)
    error.__cause__ = cause
    return error


ANOTHERS = (RankLate((1,), 4.0), RankLost((0,), "its socket is closed"), failed(None))
ITS_OWN = (failed(MemoryError()), RanksDiverged("promise", 3), MemoryError())


@pytest.mark.parametrize("error", ANOTHERS)
def test_a_rank_that_ends_because_of_another_knows_it(error: Exception) -> None:
    assert is_anothers(error)


@pytest.mark.parametrize("error", ITS_OWN)
def test_a_rank_that_failed_by_itself_knows_it(error: Exception) -> None:
    assert not is_anothers(error)


def fault_of(deaths: list[tuple[Ended, str]], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a cluster says when its ranks die in this order."""
    monkeypatch.setattr(launch, "OWN_WORDS_S", 0.01)

    async def die() -> str:
        cluster = Cluster(WorkerSettings(n_ranks=len(deaths)))
        cluster._loop = asyncio.get_running_loop()
        cluster.engine = RemoteEngine(8, {})
        cluster.ranks = [cast("Child", rank) for rank, _ in deaths]
        for rank, reason in deaths:
            cluster._note_death(cast("Child", rank), reason)
        await asyncio.sleep(0.05)
        assert cluster.died.is_set()
        return cluster.fault

    return asyncio.run(die())


def test_the_rank_that_failed_by_itself_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    told = (Ended(followed_another=True), "rank 0: a rank reported a failure of its own")
    own = (Ended(followed_another=False), "rank 1: no memory")
    for deaths in ([told, own], [own, told]):
        assert fault_of(deaths, monkeypatch) == "the decode worker is down: rank 1: no memory"


def test_where_no_rank_failed_by_itself_the_first_one_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = (Ended(followed_another=True), "rank 0: rank 1 is late")
    second = (Ended(followed_another=True), "rank 1: rank 0 is lost")
    said = fault_of([first, second], monkeypatch)
    assert said == "the decode worker is down: rank 0: rank 1 is late"
