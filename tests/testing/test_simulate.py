"""The simulator: it is repeatable, its faults strike, its checkers bite."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from attrs import evolve

from kvlift.cli.main import main
from kvlift.core import admission, apply, index, index_edit, settle, step_filling, verdicts
from kvlift.core.deed import HoldBack
from kvlift.core.draft import Draft
from kvlift.core.event import AllLanded
from kvlift.core.ids import Attempt, Ticket
from kvlift.core.index_edit import IndexEdit
from kvlift.core.landed import PeerCause, PrefetchEnded, PrefetchProgressed
from kvlift.core.phase import Filling
from kvlift.core.plan import Part
from kvlift.core.prompt import Prompt
from kvlift.effects.ports import PageRun
from kvlift.testing.sim.agenda import Agenda
from kvlift.testing.sim.command import command_of
from kvlift.testing.sim.excuses import Excuses
from kvlift.testing.sim.faults import KINDS, Faults
from kvlift.testing.sim.plan import Options, drawn_plan
from kvlift.testing.sim.report import Report
from kvlift.testing.sim.run import Result, play
from kvlift.testing.sim.shrink import shrunk
from kvlift.testing.sim.worker import SimJob, results
from kvlift.testing.sim_memory import SimMemory, page_value
from kvlift.testing.sim_store import SimStore
from kvlift.testing.story_lines import World
from kvlift.testing.story_parse import parse_story
from kvlift.testing.story_play import Player
from kvlift.testing.story_stage import Stage

pytestmark = pytest.mark.slow

SHORT = Options(n_ticks=40)
FIELDS = {
    "seed", "seeds", "ticks", "requests", "ended", "hit", "widened", "retracted", "faults",
    "failed_by_cache", "leaks", "divergences", "violations",
}  # fmt: skip


@pytest.mark.timeout(900)  # 25 s where nobody else works
@pytest.mark.parametrize("first", [0, 50])
def test_a_hundred_seeds_with_mixed_faults_break_no_claim(first: int) -> None:
    """Seeds 0 to 99 in halves, so that two processes share them; every tenth is played twice."""
    job = SimJob(
        seeds=tuple(range(first, first + 50)), options=Options(n_ticks=300), repeat_every=10
    )
    report = Report.of(first, results(job))
    assert report.violations == []
    assert report.n_failed_by_cache == report.n_leaks == report.n_divergences == 0
    assert (report.n_seeds, report.n_repeated) == (50, 5)
    assert sum(report.ended.values()) == report.n_requests
    assert report.ended["failed"] == 0
    assert min(report.ended["done"], report.ended["aborted"], report.ended["retryable"]) > 0
    assert min(report.hit["device"], report.hit["host"], report.hit["storage"]) > 0
    assert min(report.n_widened, report.n_retracted) > 0
    assert [kind for kind in KINDS if report.faults[kind] == 0] == []


def test_a_seed_that_decides_otherwise_when_played_again_is_a_violation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admit, calls = admission.admit, Counter[str]()

    def moody(draft: Draft) -> None:
        calls["admit"] += 1
        if calls["admit"] % 7:
            admit(draft)

    monkeypatch.setattr("kvlift.core.advance.admit", moody)
    options = evolve(SHORT, n_ranks=1, faults=())
    [result] = results(SimJob(seeds=(10,), options=options, repeat_every=10))
    assert [violation.claim.partition(":")[0] for violation in result.violations] == ["determinism"]


def test_without_faults_every_request_is_done() -> None:
    report = Report.of(0, (play(seed, evolve(SHORT, faults=())) for seed in range(6)))
    assert report.violations == []
    assert report.ended == Counter(done=report.n_requests)
    assert report.faults == Counter()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_strikes_alone_and_is_survived(kind: str) -> None:
    for seed in range(20):
        result = play(seed, evolve(SHORT, faults=(kind,)))
        assert result.violations == ()
        assert set(result.faults) <= {kind}
        if result.faults:
            return
    pytest.fail(f"{kind} has not struck in 20 seeds")


def test_a_prefill_node_that_stays_silent_holds_nothing_up() -> None:
    seeds = [s for s in range(200) if (p := drawn_plan(s, SHORT)).stays_silent and p.n_nodes > 1]
    results = [play(seed, evolve(SHORT, faults=("peer_silent",))) for seed in seeds[:4]]
    assert [result.violations for result in results] == [()] * 4
    assert sum(result.faults.get("peer_silent", 0) for result in results) > 0


def test_the_same_seed_decides_the_same() -> None:
    assert play(7, SHORT) == play(7, SHORT)
    assert play(7, SHORT).digest != play(8, SHORT).digest


def test_the_same_seed_decides_the_same_whatever_strings_hash_to() -> None:
    job = msgspec.json.encode(SimJob(seeds=(11, 13), options=SHORT)).decode()
    said = []
    for hash_seed in ("0", "1", "random"):
        worker = subprocess.run(
            [sys.executable, "-m", "kvlift.testing.sim.worker", job],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            timeout=60,
        )
        said.append([msgspec.json.decode(x, type=Result) for x in worker.stdout.splitlines()])
    assert said[0] == said[1] == said[2] == [play(11, SHORT), play(13, SHORT)]


def test_a_run_ends_after_the_arrivals_that_were_asked_for() -> None:
    result = play(5, Options(n_ticks=10_000, n_requests_max=4, faults=()))
    assert (result.n_requests, result.ended, result.violations) == (4, {"done": 4}, ())
    assert result.n_ticks < 1000


# Broken cores: each must be found, and by the checker that is there for it.


def failing(phase: Filling, part: Part | None, n_good: int) -> step_filling.Step:
    short = part is not None and n_good < part.n_good
    return step_filling._failed(phase, PeerCause.GONE) if short else (phase, ())


def freeing(draft: Draft, _request: object, deed: HoldBack) -> None:
    draft.free_device(deed.device)
    draft.free_host(deed.host)


def forgetting(draft: Draft) -> None:
    draft.index.freed_host = []
    collect_evicted(draft)


def early(draft: Draft, attempt: Attempt) -> None:
    found = settle._filling(draft, attempt)
    if found is not None and found[1].token is None and found[1].follow is None:
        apply.happen(draft, attempt, AllLanded())


collect_evicted = Draft.collect_evicted
STORE = ("store_fail", "store_short", "restore_fail")
BROKEN: list[tuple[object, str, Callable[..., object], tuple[str, ...], set[str]]] = [
    (step_filling, "_part_short", failing, STORE, {"failed_by_cache"}),
    (apply, "_hold_back", freeing, ("abort", "copy_slow"), {"conservation", "calls"}),
    (Draft, "collect_evicted", forgetting, (), {"conservation", "calls"}),
    (settle, "_become_ready", early, (), {"bytes", "calls", "conservation"}),
    (admission, "_admit", lambda _draft, _request, _offer: None, (), {"liveness"}),
    (IndexEdit, "unpin", lambda *_: None, (), {"conservation", "leak", "liveness", "calls"}),
    (settle, "_widen", lambda _draft, _attempt: None, STORE, {"liveness", "failed_by_cache"}),
    (
        verdicts,
        "_let_go",
        lambda _draft, _ticket: None,
        ("abort",),
        {"leak", "liveness", "conservation"},
    ),
]


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "faults", "checkers"), BROKEN, ids=[one[1] for one in BROKEN]
)
def test_a_broken_core_is_found(
    owner: object,
    name: str,
    wrong: Callable[..., object],
    faults: tuple[str, ...],
    checkers: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    options = evolve(SHORT, n_requests_max=20, faults=faults)
    for seed in range(100):
        result = play(seed, options)
        if result.violations:
            claim = result.violations[0].claim
            assert claim.partition(":")[0] in checkers, claim
            break
    else:
        pytest.fail(f"100 seeds have not found that {name} is broken")
    monkeypatch.setattr("kvlift.cli.simulate.N_SHRUNK_MAX", 0)
    words = command_of(seed, options)
    assert main(words.split()[1:]) == 1
    said = capsys.readouterr().out.replace("\n", " ")
    assert f"seed {seed}, tick {result.violations[0].tick}" in said
    assert words in " ".join(said.split())


def test_a_core_that_forgets_whose_tokens_they_are_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def anybodys(parent: int, prompt: Prompt, page: int) -> tuple[int, bytes]:
        return parent, child_key(parent, evolve(prompt, namespace=bytes(32)), page)[1]

    child_key = index.child_key
    for module in (index, index_edit):
        monkeypatch.setattr(module, "child_key", anybodys)
    seeds = [seed for seed in range(100) if drawn_plan(seed, SHORT).n_tenants > 1]
    claims = (v.claim for s in seeds for v in play(s, evolve(SHORT, faults=())).violations)
    assert next(claims).startswith(("bytes", "isolation", "calls"))


def test_a_rank_that_decides_by_itself_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    admit, calls = admission.admit, Counter[str]()

    def moody(draft: Draft) -> None:
        calls["admit"] += 1
        if calls["admit"] % 7:
            admit(draft)

    monkeypatch.setattr("kvlift.core.advance.admit", moody)
    result = play(1, evolve(SHORT, n_ranks=3))
    assert result.violations[0].claim.startswith("agreement")
    assert result.n_divergences > 0


def test_a_violation_is_shrunk_and_its_command_plays_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(step_filling, "_part_short", failing)
    options = evolve(SHORT, faults=("store_fail", "store_short", "store_slow", "abort"))
    result = next(r for seed in range(100) if (r := play(seed, options)).violations)
    found = shrunk(result, options, seconds_max=5)
    assert found.options.n_ticks < options.n_ticks
    assert found.options.faults is not None
    assert len(found.options.faults) < 3
    assert found.result.violations[0].claim.startswith("failed_by_cache")
    command = command_of(result.seed, found.options)
    asked = [*command.split()[1:], "--stories", str(tmp_path), "--json"]
    assert main(asked) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["failed_by_cache"] == found.result.n_failed_by_cache > 0
    claims = [violation["claim"] for violation in told["violations"]]
    assert claims == [violation.claim for violation in found.result.violations]
    assert told["violations"][0]["command"] == command


# The parts.


def test_time_passes_in_the_order_of_what_is_due() -> None:
    agenda, said = Agenda(), list[tuple[int, str]]()
    agenda.after(20, lambda: said.append((agenda.now_ns, "b")))
    agenda.after(10, lambda: agenda.after(5, lambda: said.append((agenda.now_ns, "a"))))
    agenda.after(20, lambda: said.append((agenda.now_ns, "c")))
    assert agenda.next_ns() == 10
    agenda.run_until(30)
    assert said == [(15, "a"), (20, "b"), (20, "c")]
    assert (agenda.now_ns, agenda.next_ns()) == (30, None)


def test_only_harm_during_a_request_excuses_it() -> None:
    excuses = Excuses()
    excuses.request("A", 10, "late")
    excuses.node_is_bad("p", 20, "died")
    assert excuses.found("A", "q", 10) == "late"
    assert excuses.found("A", "q", 11) is None
    assert excuses.found("B", "p", 50) == "died"
    excuses.node_is_well("p", 60)
    assert excuses.found("B", "p", 60) == "died"
    assert excuses.found("B", "p", 61) is None


def test_what_a_read_has_reported_is_not_written_again() -> None:
    memory = SimMemory(1, 3)
    store, prompt = SimStore(memory), Prompt(bytes(32), bytes(12), 1)
    values = [page_value(prompt, position) for position in range(3)]
    for value in values:
        store.put(value)
    store.start_prefetch(Ticket(1), PageRun(prompt, (0, 1, 2)), [2, 1, 0])
    [read] = store.log
    store.progress(read, 1)
    assert [(access.kind, access.pages) for access in store.accesses()] == [("writes", (1, 0))]
    memory.host[2] = None
    store.lose(values[0])
    store.land(read, 2)
    assert memory.host == [None, values[1], None]
    assert store.outbox.drain() == [
        PrefetchProgressed(Ticket(1), 1),
        PrefetchEnded(Ticket(1), 2),
    ]


def test_kinds_that_are_left_out_change_nothing_for_the_others() -> None:
    every = Faults.drawn(3, tuple(KINDS))
    some = Faults.drawn(3, ("abort", "pause"))
    assert some.rates == {kind: every.rates[kind] for kind in ("abort", "pause")}
    assert [some.strikes("abort") for _ in range(99)] == [every.strikes("abort") for _ in range(99)]


# The command.


def test_the_command_prints_what_scripts_rely_on(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["simulate", "--seeds", "4", "--ticks", "30", "--jobs", "2", "--repeat-every", "2"]
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) >= FIELDS
    assert (told["seed"], told["seeds"], told["repeated"], told["violations"]) == (0, 4, 2, [])
    assert main([*asked[:-4], "--jobs", "1", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["requests"] == told["requests"]


def test_a_fault_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--faults", "peer_dyes"]) == 2
    assert "did you mean peer_dies?" in capsys.readouterr().err


def test_a_trace_is_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {
            "timestamp": 100 * number,
            "input_length": 512 * 5,
            "output_length": 100,
            "hash_ids": [1, 2, 3, number % 3 + 10, number + 100],
        }
        for number in range(20)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ["simulate", "--seed", "0", "--trace", str(trace), "--faults", "none"]
    asked += ["--ticks", "2000", "--json"]
    assert main(asked) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ended"]["done"] == told["requests"] == 20
    assert sum(told["hit"].values()) > 20
    trace.write_text("no trace\n")
    assert main(asked) == 2
    assert "line 1" in capsys.readouterr().err


# What the simulator has found, in small.


def played(text: str) -> Stage:
    story = parse_story(text)
    world = story.lines[0].statement
    assert isinstance(world, World)
    stage = Stage(world)
    for line in story.lines:
        Player(stage).play(line)
    return stage


def test_a_first_token_outlives_the_peer_that_sent_it() -> None:
    stage = played(
        """
        world ranks=2 page=4 device=16
        ports held peer
        prompt A pages=2
        prompt B from=A[0:2] pages=2
        submit A
        tick 3
        submit B
        tick 5
        fail peer B
        tick 3
        expect B filling
        land peer A
        expect within 4 ticks B ready
        """
    )
    request = stage.requests.by_name["B"]
    assert request.first_tokens == [request.prompt.stream.token_at(8)] * 2


def test_a_resumed_request_has_no_first_token_on_any_rank() -> None:
    stage = played(
        """
        world ranks=2 page=4 device=16 host=0
        config write=none persist=off
        prompt A pages=1
        submit A
        expect within 6 ticks A ready
        run A
        tick
        retract A
        tick
        resume A
        expect within 6 ticks A ready
        """
    )
    assert stage.requests.by_name["A"].first_tokens == [None, None]


def test_room_that_comes_back_while_nothing_is_under_way_is_noticed() -> None:
    """The last request grows into pages that its rank had set aside, and no ballot was out."""
    kinds = ("detach", "mirror_fail", "pause", "peer_fails", "persist_fail", "set_aside")
    faults = (*kinds, "store_damaged", "store_lost")
    result = play(323, Options(n_ticks=2000, n_ranks=4, faults=faults, n_requests_max=202))
    assert result.violations == ()


def test_dirty_pages_without_room_below_do_not_hold_up_those_with_room() -> None:
    result = play(834, Options(n_ticks=31, n_ranks=4, faults=(), n_requests_max=3))
    assert result.violations == ()


def test_a_deadline_behind_many_late_answers_is_waited_for() -> None:
    """30 s of quarantine, and something that happens every 20 ms until then: nothing is left."""
    result = play(992, Options(n_ticks=2000, n_ranks=4))
    assert result.violations == ()
    assert result.n_leaks == 0
