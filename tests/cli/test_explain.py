"""What `kvlift explain` says of a request that is not there."""

import json
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


def test_a_journal_of_another_core_is_not_said_to_lack_the_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = JournalWorld()
    world.live("A", prompt_of(6))
    world.close()
    lines = list(world.journal())
    first = next(number for number, line in enumerate(lines) if b'"line":"tick"' in line)
    tick = json.loads(lines[first])
    tick["decided"]["digest"] = "00" * 16
    lines[first] = json.dumps(tick).encode() + b"\n"
    journal = tmp_path / "run.ndjson"
    journal.write_bytes(b"".join(lines))
    assert main(["explain", str(journal), "A"]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert "names 'A', and can't be followed so far: `kvlift replay " in said
