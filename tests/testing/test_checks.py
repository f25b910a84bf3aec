"""The checkers notice what breaks no request of the same run: bytes in storage, untold ends."""

from collections.abc import Sequence

import pytest
from attrs import evolve

from kvlift.core.ids import Ticket
from kvlift.effects.ports import PageRun
from kvlift.testing.sim.plan import Options
from kvlift.testing.sim.run import Result, play
from kvlift.testing.sim_peers import SimPeers
from kvlift.testing.sim_store import SimStore

SHORT = Options(n_ticks=60, n_ranks=1, faults=())


def first_violation(options: Options) -> Result:
    for seed in range(40):
        result = play(seed, options)
        if result.violations:
            return result
    pytest.fail("40 seeds have found nothing")


@pytest.mark.slow
def test_a_page_that_is_written_from_a_wrong_place_is_found_though_nobody_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its checksum is right, since it was made of what was written."""
    write = SimStore.start_persist

    def crosswise(store: SimStore, ticket: Ticket, run: PageRun, host_pages: Sequence[int]) -> None:
        write(store, ticket, run, host_pages[::-1])

    monkeypatch.setattr(SimStore, "start_persist", crosswise)
    monkeypatch.setattr(SimStore, "_n_present", lambda *_: 0)  # nobody ever reads
    claim = first_violation(SHORT).violations[0].claim
    assert claim.startswith("bytes: ")
    assert "in storage" in claim


@pytest.mark.slow
def test_a_prefill_node_that_never_hears_that_it_may_let_go_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would keep the pages for as long as the lease is renewed: for ever."""
    monkeypatch.setattr(SimPeers, "send_committed", lambda *_: None)
    result = first_violation(evolve(SHORT, n_requests_max=6))
    assert "was not told" in result.violations[0].claim


@pytest.mark.slow
def test_a_prefill_node_that_stays_silent_was_told_though_it_does_not_confirm_it() -> None:
    assert not play(887, Options(n_ticks=2000, n_ranks=4)).violations
