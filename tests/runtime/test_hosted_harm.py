"""A worker whose ballot is missing has not agreed."""

import pytest

from tests.runtime.test_hosted import Host, prompt


def test_a_missing_ballot_is_refused_and_the_request_goes_on_when_it_comes() -> None:
    host = Host(n_workers=3)
    host.scheduler.submit("a", prompt(4), peer="p")
    while not host.ballots:
        host.step()
    host.step()
    before = host.scheduler.state.agreed
    for some in (host.ballots[:2], [*host.ballots, host.ballots[0]]):
        with pytest.raises(ValueError, match="of 3 workers"):
            host.scheduler.tick(some)
    assert host.scheduler.state.agreed == before
    assert host.until_ready("a").rid == "a"
