"""A tick of the core: pure, the same everywhere, and right in the corners that once were wrong."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from kvlift.core.adopt import adopt_agreed
from kvlift.core.advance import Outcome, State, advance
from kvlift.core.ballot import Verdict
from kvlift.core.effect import SendHold, SendWant, StartLookup, StartPrefetch, StartRestore
from kvlift.core.ids import Rid
from kvlift.core.invariants import breaches
from kvlift.core.landed import (
    Landed,
    LookupAnswered,
    PeerCause,
    PeerFailed,
    PeerLetGo,
    PrefetchEnded,
    RestoreEnded,
)
from kvlift.core.notice import HasEnded, WasRefused
from kvlift.core.phase import Filling
from kvlift.core.phase import Outcome as End
from kvlift.core.policy import Policy, WritePolicy
from kvlift.core.prompt import token_bytes
from kvlift.core.submission import Abort, Finish, Flush, Resume, Retract, Run, Submission
from kvlift.core.tier import Tier
from tests.core.scenario import Ranks, prompt_of, submit

ROOT = Path(__file__).parents[2]
POLICY = Policy(n_device_pages=12, n_host_pages=12, ballot_slots=8)


def _life(ranks: Ranks) -> None:
    """Two turns of a conversation, one retraction, one abort."""
    first = prompt_of(1, 2, 3, odd=1)
    calls: dict[int, list[Submission]] = {
        0: [submit("A", first), submit("B", prompt_of(1, 2, 9))],
        3: [Abort(Rid("B"))],
        6: [Run(Rid("A"))],
        8: [Retract(Rid("A"), token_bytes([5, 6, 7]))],
        12: [Resume(Rid("A"))],
        20: [Run(Rid("A"))],
        22: [Finish(Rid("A"), token_bytes([5, 6, 7, 8, 9]))],
    }
    for number in range(30):
        ranks.tick(*calls.get(number, []))
        ranks.answer()
        for rank, effects in enumerate(ranks.started):
            for effect in effects:
                if isinstance(effect, StartRestore):
                    ranks.tell(RestoreEnded(effect.ticket, len(effect.host)), rank=rank)


def digest_of_a_life() -> str:
    ranks = Ranks(POLICY, n_ranks=2)
    _life(ranks)
    return ranks.states[0].agreed.digest.hex()


def test_a_life_has_one_digest_whatever_the_seed_of_hashes() -> None:
    code = "from tests.core.test_advance import digest_of_a_life as f; print(f())"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("0", "1", "4242")
    }
    assert found == {digest_of_a_life()}


class _Twice(Ranks):
    """Every tick is decided twice, from a state that must not change."""

    def _advance(
        self, state: State, verdict: Verdict | None, calls: Iterable[Submission]
    ) -> Outcome:
        before = repr(state)
        calls = tuple(calls)
        one, two = (
            advance(
                state, verdict, calls, policy=self.policy, limits=self.limits, now_ns=self.now_ns
            )
            for _ in range(2)
        )
        assert one == two
        assert one[0].agreed.digest == two[0].agreed.digest
        assert repr(state) == before
        return super()._advance(state, verdict, calls)


def test_advance_is_a_function_of_its_arguments() -> None:
    ranks = _Twice(POLICY)
    _life(ranks)
    assert ranks.states[0].agreed.tick == 30


def _answered(ranks: Ranks, n_ticks: int) -> None:
    for _ in range(n_ticks):
        ranks.tick()
        ranks.answer()


def _adopt(ranks: Ranks, tier: Tier, *pages: int) -> None:
    prompt = prompt_of(*pages)
    for number, state in enumerate(ranks.states):
        agreed, _decision, _adopted = adopt_agreed(
            state.agreed, tier, prompt, 0, len(pages), ranks.policy
        )
        ranks.states[number] = State(agreed=agreed, local=state.local)


# What was once wrong.


def test_a_rank_that_finds_less_before_the_others_answer_does_not_make_it_nothing() -> None:
    ranks = Ranks(POLICY, n_ranks=2)
    ranks.tick(submit("A", prompt_of(1, 2, 3, 4)))
    (lookup,) = ranks.tickets(StartLookup)
    ranks.tell(LookupAnswered(lookup, 2), rank=0)
    ranks.tick()
    assert ranks.phase("A") == "Asking"
    ranks.tell(LookupAnswered(lookup, 3), rank=1)
    ranks.tick()
    request = ranks.request("A")
    assert request is not None
    assert isinstance(request.phase, Filling)
    assert request.phase.plan.promise == 2


def test_a_peer_that_lets_go_without_a_word_fails_the_request_that_needs_it() -> None:
    for reports in (["go"], ["go", "fail"]):
        ranks = Ranks(POLICY)
        ranks.tick(submit("A", prompt_of(1, 2)))
        (hold,) = ranks.tickets(SendHold)
        ranks.answer()
        said: dict[str, Landed] = {
            "go": PeerLetGo(hold),
            "fail": PeerFailed(hold, PeerCause.GONE, "gone"),
        }
        ranks.tell(*(said[word] for word in reports))
        ranks.tick()
        assert ranks.decision is not None
        ended = [n for n in ranks.decision.notices if isinstance(n, HasEnded)]
        assert [(n.outcome, n.cause) for n in ended] == [(End.FAILED, PeerCause.LOST)]
        assert not ranks.states[0].agreed.requests


def test_a_follower_that_was_submitted_before_its_leader_takes_over_what_is_left() -> None:
    """The leader's priority let it overtake; it has published pages the follower has not seen."""
    ranks = Ranks(Policy(n_device_pages=20, n_host_pages=12))
    _adopt(ranks, Tier.HOST, 1, 2)
    ranks.n_stored = 2
    ranks.tick(submit("F", prompt_of(1, 2, 3, 4, 5)), submit("L", prompt_of(1, 2, 3, 4, 6), 1))
    lookups = ranks.tickets(StartLookup)
    ranks.tell(*(LookupAnswered(ticket, 2) for ticket in lookups))
    ranks.tick()
    request = ranks.request("F")
    assert request is not None
    assert isinstance(request.phase, Filling)
    assert request.phase.follow is not None, "the story of this test needs a follower"
    (restore,) = ranks.tickets(StartRestore)
    ranks.tell(RestoreEnded(restore, 2))
    ranks.tick()
    ranks.tick(Abort(Rid("L")))
    request = ranks.request("F")
    assert request is not None
    assert isinstance(request.phase, Filling)
    assert len(request.phase.lease.own) + request.phase.lease.n_shared == 5
    assert ranks.states[0].agreed.ledger.device_live == 5 + _n_draining(ranks)


def test_a_follower_of_pages_that_were_flushed_takes_over_nothing_of_them() -> None:
    ranks = Ranks(Policy(n_device_pages=20, n_host_pages=12))
    _adopt(ranks, Tier.HOST, 1, 2)
    for calls in ([submit("L", prompt_of(1, 2, 3, 4))], []):
        ranks.tick(*calls)
        ranks.tell(*(LookupAnswered(ticket, 0) for ticket in ranks.tickets(StartLookup)))
    (restore,) = ranks.tickets(StartRestore)
    ranks.tell(RestoreEnded(restore, 2))
    ranks.tick()
    flush: list[Submission] = [Flush(Tier.DEVICE), submit("F", prompt_of(1, 2, 3, 4))]
    for more in (flush, []):
        ranks.tick(*more)
        ranks.tell(*(LookupAnswered(ticket, 0) for ticket in ranks.tickets(StartLookup)))
    request = ranks.request("F")
    assert request is not None
    assert isinstance(request.phase, Filling)
    assert request.phase.follow is not None
    ranks.tick(Abort(Rid("L")))
    request = ranks.request("F")
    assert request is not None
    assert isinstance(request.phase, Filling)
    assert len(request.phase.lease.own) == 4
    assert not breaches(ranks.states[0].agreed)


def _n_draining(ranks: Ranks) -> int:
    return sum(len(drain.device) for drain in ranks.states[0].agreed.drains)


def test_an_output_that_contradicts_the_one_before_is_refused() -> None:
    ranks = Ranks(POLICY)
    ranks.tick(submit("A", prompt_of(1, 2)))
    ranks.answer()
    _answered(ranks, 3)
    ranks.tick(Run(Rid("A")))
    ranks.tick(Retract(Rid("A"), token_bytes([5, 5, 5])))
    ranks.tick(Resume(Rid("A")))
    for _ in range(6):
        ranks.answer()
        ranks.tick()
    ranks.tick(Run(Rid("A")))
    for output in ([], [5], [6, 5, 5]):
        ranks.tick(Finish(Rid("A"), token_bytes(output)))
        assert ranks.decision is not None
        refused = [n for n in ranks.decision.notices if isinstance(n, WasRefused)]
        assert [n.call for n in refused] == ["Finish"]
        assert ranks.phase("A") == "Running"
    ranks.tick(Finish(Rid("A"), token_bytes([5, 5, 5, 5])))
    assert ranks.phase("A") == "gone"


def test_the_head_of_a_line_that_may_not_be_overtaken_lets_dirty_pages_go_down() -> None:
    policy = Policy(
        n_device_pages=5, n_host_pages=2, write=WritePolicy.BACK, bypass_max=0, ballot_slots=8
    )
    ranks = Ranks(policy)
    _adopt(ranks, Tier.DEVICE, 8)
    ranks.tick(submit("A", prompt_of(1, 2, 3, 4, 5)))
    ranks.answer()
    ranks.tick()
    names = [type(effect).__name__ for effect in ranks.started[0]]
    assert ranks.phase("A") == "Waiting"
    assert "StartMirror" in names


def test_a_prompt_without_a_full_page_asks_storage_nothing() -> None:
    ranks = Ranks(POLICY)
    ranks.tick(submit("A", prompt_of(odd=1)))
    assert not ranks.tickets(StartLookup)
    ranks.answer()
    _answered(ranks, 3)
    assert ranks.phase("A") == "Ready"


def test_a_device_of_exactly_one_prompt_takes_it() -> None:
    ranks = Ranks(Policy(n_device_pages=3, n_host_pages=0, ballot_slots=8))
    for rid in ("A", "B"):
        ranks.tick(submit(rid, prompt_of(1, 2, 3)), submit(rid, prompt_of(1, 2, 3)))
        ranks.answer()
        _answered(ranks, 4)
        assert ranks.phase(rid) == "Ready"
        ranks.tick(Run(Rid(rid)))
        ranks.tick(Finish(Rid(rid), b""))


def test_the_read_that_one_rank_gives_up_keeps_what_came_on_all() -> None:
    ranks = Ranks(POLICY, n_ranks=2)
    ranks.n_stored = 3
    ranks.tick(submit("A", prompt_of(1, 2, 3, 4)))
    ranks.answer()
    ranks.tick()
    (read,) = ranks.tickets(StartPrefetch)
    ranks.tell(PrefetchEnded(read, 3), rank=0)
    ranks.tell(PrefetchEnded(read, 1), rank=1)
    ranks.tick()
    request = ranks.request("A")
    assert request is not None
    assert isinstance(request.phase, Filling)
    assert request.phase.plan.bounds.storage == 1
    copies = {
        effect.ticket: (rank, len(effect.host))
        for rank, effects in enumerate(ranks.started)
        for effect in effects
        if isinstance(effect, StartRestore)
    }
    for rank, effects in enumerate(ranks.started):
        for effect in effects:
            if isinstance(effect, StartRestore):
                ranks.tell(RestoreEnded(effect.ticket, len(effect.host)), rank=rank)
    assert len(copies) == 1
    ranks.tick()
    wants = [e for e in ranks.started[0] if isinstance(e, SendWant)]
    assert [(w.start, len(w.device), w.promise) for w in wants] == [(1, 2, 1)]
