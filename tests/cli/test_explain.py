"""What `kvlift explain` says of a request that is not there."""

from pathlib import Path

import pytest

from kvlift.cli.explain import RIDS_SHOWN_MAX
from kvlift.cli.main import main
from tests.runtime.journal_world import JournalWorld, prompt_of


@pytest.mark.parametrize("n_requests", [0, 1, RIDS_SHOWN_MAX, RIDS_SHOWN_MAX + 2])
def test_an_unknown_request_is_answered_with_those_that_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], n_requests: int
) -> None:
    world = JournalWorld()
    for number in range(n_requests):
        world.live(f"request-{number}", prompt_of(6, 100 * number))
    world.tick()
    world.close()
    journal = tmp_path / "run.ndjson"
    journal.write_bytes(b"".join(world.journal()))
    assert main(["explain", str(journal), "nobody"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "does not name a request 'nobody'" in line
    n_shown = min(n_requests, RIDS_SHOWN_MAX)
    assert line.count("request-") == n_shown
    assert ("and 2 more" in line) == (n_requests > RIDS_SHOWN_MAX)
    assert ("it names none" in line) == (n_requests == 0)
