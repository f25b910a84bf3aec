"""Some thousand inputs for each surface; what the long runs have found; and the meter itself.

The long run is `make fuzz`; its result is benches/results/fuzz.json.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from attrs import define, field

from kvlift.core.policy import Switch
from kvlift.effects.stores.folder import MARKER, Folder, StoreRefusedError
from kvlift.runtime.worker.http_body import MESSAGE_CHARACTERS_MAX, error_response
from kvlift.testing.story_parse import parse_story
from kvlift.testing.story_words import StoryError
from tests.fuzz import guided, harness
from tests.fuzz.__main__ import shares
from tests.fuzz.harness import Meter, Surface, by_grammar, by_hypothesis
from tests.fuzz.surfaces import GUIDED, SURFACES, surface_of
from tests.fuzz.wire_surface import hear_as_decode, hear_as_prefill, unpacked

N_INPUTS = 3_000
OUTCOMES = {
    "wire": {"refused", "understood", "served by prefill", "open at decode"},
    "pages": {"page read", "page damaged", "marker made anew", "counter unknown", "name of a page"},
    "journal": {"read", "refused", "read, cut short", "replayed, identical", "not replayed"},
    "story": {"understood", "refused"},
    "http": {"status 200", "status 400", "status 404", "status 429", "status 499", "status 503"},
}
"""What the inputs of each grammar must reach, or they would test nothing."""


@pytest.fixture
def surface(request: pytest.FixtureRequest) -> Iterator[Surface]:
    made = surface_of(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("surface", SURFACES, indirect=True)
def test_some_thousand_wrong_inputs_are_refused_in_time_and_in_bounded_memory(
    surface: Surface,
) -> None:
    meter = Meter(surface)
    by_grammar(meter, N_INPUTS, 1, lambda: None)
    by_hypothesis(meter, 60, 1, lambda: None)
    report = meter.report()
    assert not report["failures"], report["failures"]
    assert report["inputs"] >= N_INPUTS
    assert OUTCOMES[surface.name] <= set(report["outcomes"])


@pytest.mark.parametrize("surface", SURFACES, indirect=True)
def test_any_bytes_at_all_are_an_input(surface: Surface) -> None:
    draw, meter = Random(2), Meter(surface)
    for size in (0, 1, 2, 3, 10, 100, 3000):
        for _ in range(20):
            meter.feed(draw.randbytes(size))
    assert not meter.failures, meter.failures


@pytest.mark.parametrize("surface", SURFACES, indirect=True)
def test_the_grammar_makes_the_same_inputs_from_the_same_seed(surface: Surface) -> None:
    assert surface.made(Random(5)) == surface.made(Random(5))
    assert len({surface.made(Random(seed)) for seed in range(50)}) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDED)
def test_atheris_finds_its_way_into_the_decoders(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not guided.is_there():
        pytest.skip(guided.NEEDED)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    report = guided.by_coverage(name, 2_000, 1)
    assert report["inputs"] == 2_000
    assert not report["failures"], report["failures"]
    assert len(report["outcomes"]) > 1
    assert not list(tmp_path.iterdir())


def test_the_command_prints_one_json_value_with_what_it_has_seen() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "story", "--inputs", "400", "--json"]
    ended = subprocess.run(command, capture_output=True, check=False, cwd=guided.ROOT, timeout=100)
    report = json.loads(ended.stdout)
    assert ended.returncode == 0, report
    assert (report["surface"], report["inputs"]) == ("story", 400)
    assert sum(report["outcomes"].values()) == sum(report["engines"].values()) == 400
    assert report["peak_rss_mib"] > 0


@pytest.mark.parametrize("name", SURFACES)
def test_the_engines_share_all_inputs(name: str) -> None:
    for n_inputs in (1, 100, 1_000_000):
        assert sum(shares(name, n_inputs).values()) == n_inputs
    assert shares(name, 1_000_000)["hypothesis"] == 10_000


# -- the meter ------------------------------------------------------------------------------------


@define(eq=False)
class Faulty:
    """A surface with a fault of every kind, each for inputs of its own."""

    name: str = "faulty"
    kept: list[bytearray] = field(factory=list)

    def made(self, draw: Random) -> bytes:
        return bytes([draw.randrange(1, 200)])

    def fed(self, data: bytes) -> str:
        match data[0]:
            case 201:
                raise KeyError("nobody declared this")
            case 202:
                while True:
                    time.sleep(0.01)
            case 203:
                until_s = time.process_time() + 0.3
                while time.process_time() < until_s:
                    pass
            case 204:
                self.kept.append(bytearray(b"x") * (64 << 20))
            case _:
                pass
        return "fine"

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("first_byte", "words"),
    [(201, "KeyError"), (202, "HangError"), (203, "CostError"), (204, "CostError: memory")],
)
def test_the_meter_notices_crashes_hangs_slow_inputs_and_growing_memory(
    monkeypatch: pytest.MonkeyPatch, first_byte: int, words: str
) -> None:
    # On a busy machine, what takes processor time must not count as standing still.
    monkeypatch.setattr(harness, "WALL_S_MAX", 1.0 if words == "HangError" else 60.0)
    monkeypatch.setattr(harness, "CPU_S_MAX", 0.2)
    monkeypatch.setattr(harness, "GROWTH_BYTES_MAX", 96 << 20)
    peak_bytes = 1 << 30
    meter = Meter(Faulty())
    # The peak of this process is what earlier tests have left: it is measured from here on.
    kept = meter.surface
    assert isinstance(kept, Faulty)
    monkeypatch.setattr(
        harness, "peak_bytes", lambda: peak_bytes + sum(len(each) for each in kept.kept)
    )
    by_grammar(meter, harness.N_WARM, 1, lambda: None)
    assert not meter.failures
    meter.feed(bytes([first_byte]))
    meter.feed(bytes([first_byte]))
    [failure] = meter.failures
    assert str(failure["error"]).startswith(words)
    assert failure["input_bytes"] == 1


def test_hypothesis_makes_the_fault_small_and_the_meter_keeps_it() -> None:
    class Long(Faulty):
        def made(self, draw: Random) -> bytes:
            return bytes(draw.randint(0, 1000))

        def fed(self, data: bytes) -> str:
            assert len(data) < 100, "too long"
            return "fine"

    meter = Meter(Long())
    by_hypothesis(meter, 200, 1, lambda: None)
    assert meter.failures


# -- what was found -------------------------------------------------------------------------------


def corpus() -> list[Path]:
    folder = Path(__file__).parent / "corpus"
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", corpus(), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_once_broke_a_surface_breaks_it_no_more(path: Path) -> None:
    surface = surface_of(path.parent.name)
    try:
        meter = Meter(surface)
        meter.feed(path.read_bytes())
    finally:
        surface.close()
    assert not meter.failures, meter.failures


@pytest.mark.parametrize("kind", ["deep", "deep objects", "long", "a pipe", "a folder", "a link"])
def test_whatever_stands_in_the_marker_s_place_is_looked_at_and_never_waited_for(
    tmp_path: Path, kind: str
) -> None:
    folder = Folder(tmp_path / "kv")
    folder.create(Switch.OFF)
    marker = folder.root / MARKER
    valid = marker.read_bytes()
    marker.unlink()
    match kind:
        case "deep":
            marker.write_bytes(b"[" * 4096)
        case "deep objects":
            marker.write_bytes(b'{"a":' * 800)
        case "long":
            with marker.open("wb") as file:
                file.truncate(1 << 40)  # it takes no room, and must take no memory
        case "a pipe":
            import os

            os.mkfifo(marker)
        case "a folder":
            marker.mkdir()
        case _:
            (tmp_path / "elsewhere").write_bytes(valid)
            marker.symlink_to(tmp_path / "elsewhere")
    assert not folder.is_store()
    if kind == "a folder":
        with pytest.raises(StoreRefusedError, match="can't be used"):
            folder.create(Switch.OFF)
        return
    folder.create(Switch.OFF)
    assert folder.is_store()


def test_a_story_that_wants_a_million_pages_many_times_is_refused_at_once() -> None:
    started_s = time.process_time()
    wants = ",".join(["0:60000"] * 1000)
    with pytest.raises(StoryError, match="pages are named"):
        parse_story(f"prompt A pages=4\nexpect A wants {wants}\n")
    assert time.process_time() - started_s < 1.0


def test_an_error_does_not_send_back_all_that_was_sent() -> None:
    answer = error_response("x" * 1_000_000, 400)
    assert len(answer.body) < 2 * MESSAGE_CHARACTERS_MAX


# -- what the fuzzing of conversations rests on ---------------------------------------------------


def test_a_conversation_of_the_grammar_can_reach_every_state() -> None:
    """Without harm a rank is served and a node opens; with a secret neither goes further."""
    surface, words = surface_of("wire"), set()
    draw = Random(9)
    for _ in range(300):
        end, messages = unpacked(surface.made(draw))
        if end in (2, 3):
            words.add((end, hear_as_prefill(messages, None, 1)))
        elif end in (4, 5):
            words.add((end, hear_as_decode(messages, None)))
    assert (2, "served by prefill") in words
    assert (4, "open at decode") in words
