import contextlib
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.landed import PeerCause, PeerFailed
from kvlift.core.prompt import Prompt
from kvlift.effects import wire
from kvlift.effects.peers import ZmqPeers
from kvlift.runtime.prefill import PrefillNode
from kvlift.runtime.prefill_requests import How
from tests.effects.peers_conformance import A1, R1, T1, T2, Gathered, prompt_of
from tests.effects.raw_wire import RawRank
from tests.effects.wire_world import (
    LAYOUT,
    PAGE_BYTES,
    Node,
    PlainMemory,
    PlainPages,
    page_content,
    zmq_peers,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def make_node() -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(bind: str = "tcp://127.0.0.1:*", **options: Any) -> Node:
        nodes.append(Node(bind, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        assert node.node.close(5)


MakeNode = Callable[..., Node]


def until(holds: Callable[[], bool], what: str, timeout_s: float = 8.0) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, f"{what} did not come to pass"
        time.sleep(0.005)


def how_ended(node: Node, rid: str = "one") -> How:
    def has_ended() -> bool:
        node.hear()
        return any(one.rid == rid for one in node.ended)

    until(has_ended, f"the end of {rid}")
    (ended,) = [one for one in node.ended if one.rid == rid]
    return ended.how


class Decode:
    """A decode rank and its reports."""

    def __init__(self, address: str, **options: Any) -> None:
        self.address = address
        self.memory = PlainMemory(**options.pop("memory", {}))
        self.peers: ZmqPeers = zmq_peers(self.memory, **options)
        self.got = Gathered(self)  # type: ignore[arg-type]

    def step(self) -> None:
        time.sleep(0.005)

    def hold(self, ticket: Ticket = T1, rid: Rid = R1, prompt: Prompt | None = None) -> None:
        self.peers.send_hold(ticket, rid, A1, self.address, prompt or prompt_of(8))


def the_failure(rank: Decode, ticket: Ticket = T1) -> PeerFailed:
    rank.got.until(lambda: bool(rank.got.failures(ticket)), "a failure")
    (failure,) = rank.got.failures(ticket)
    return failure


@pytest.fixture
def make_decode() -> Iterator[Callable[..., Decode]]:
    ranks: list[Decode] = []

    def make(address: str, **options: Any) -> Decode:
        ranks.append(Decode(address, **options))
        return ranks[-1]

    yield make
    for rank in ranks:
        assert rank.peers.close(5)


MakeDecode = Callable[..., Decode]


def two_ranks(node: Node, make_decode: MakeDecode, **options: Any) -> list[Decode]:
    return [make_decode(node.address, rank=rank, n_ranks=2, **options) for rank in (0, 1)]


# -- several ranks -------------------------------------------------------------------------------


def test_a_request_of_two_ranks_is_announced_once_and_each_rank_gets_its_shard(
    make_node: MakeNode, make_decode: MakeDecode
) -> None:
    node = make_node()
    ranks = two_ranks(node, make_decode)
    for rank in ranks:
        rank.hold()
    until(lambda: node.knows(R1), "the hold")
    node.node.page_ready(R1, A1, 8)
    ranks[0].peers.send_want(T1, 6, [0, 1], 6)
    ranks[0].got.quiet()
    assert ranks[0].got.n_pages(T1) == 0, "rank 1 has not said what it wants"
    ranks[1].peers.send_want(T1, 6, [8, 9], 6)
    for number, rank in enumerate(ranks):
        rank.got.until_pages(T1, 2)
        place = (0, 8)[number]
        assert bytes(rank.memory.pages[place]) == page_content(R1, 6, number)
    assert [(one.rid, one.n_ranks) for one in node.asked] == [(R1, 2)]
    assert node.asked[0].prompt == prompt_of(8)
    ranks[0].peers.send_committed(T1)
    ranks[0].got.quiet()
    assert node.knows(R1), "rank 1 has not committed"
    ranks[1].peers.send_committed(T1)
    assert how_ended(node) is How.COMMITTED


def test_a_widening_waits_for_both_ranks_too(make_node: MakeNode, make_decode: MakeDecode) -> None:
    node = make_node()
    ranks = two_ranks(node, make_decode)
    for rank in ranks:
        rank.hold()
        rank.peers.send_want(T1, 6, [6, 7], 6)
    until(lambda: node.knows(R1), "the hold")
    node.node.page_ready(R1, A1, 8)
    for rank in ranks:
        rank.got.until_pages(T1, 2)
    ranks[1].peers.send_want(T1, 3, [3, 4, 5], 3)
    ranks[1].got.quiet()
    assert ranks[1].got.n_pages(T1) == 2
    ranks[0].peers.send_want(T1, 3, [3, 4, 5], 3)
    for rank in ranks:
        rank.got.until_pages(T1, 5)


def test_ranks_that_want_different_pages_are_both_rejected_and_told_why(
    make_node: MakeNode, make_decode: MakeDecode
) -> None:
    node = make_node()
    ranks = two_ranks(node, make_decode)
    for rank in ranks:
        rank.hold()
    until(lambda: node.knows(R1), "the hold")
    for number, rank in enumerate(ranks):
        rank.peers.send_want(T1, 4 + number, [0], 4)
    for rank in ranks:
        failure = the_failure(rank)
        assert failure.cause is PeerCause.REFUSED
        assert "[4, 5)" in failure.reason
        assert "[5, 6)" in failure.reason
    assert how_ended(node) is How.REJECTED


def test_ranks_that_hold_different_prompts_under_one_name_are_told_so(
    make_node: MakeNode, make_decode: MakeDecode
) -> None:
    node = make_node()
    ranks = two_ranks(node, make_decode)
    ranks[0].hold()
    until(lambda: node.knows(R1), "the hold")
    ranks[1].hold(prompt=prompt_of(8, seed=2))
    ranks[1].got.until(lambda: bool(ranks[1].got.failures(T1)), "the rejection")
    assert "different prompts" in ranks[1].got.failures(T1)[0].reason


def test_a_rejection_reaches_a_rank_whose_hold_comes_later(
    make_node: MakeNode, make_decode: MakeDecode
) -> None:
    node = make_node()
    ranks = two_ranks(node, make_decode)
    ranks[0].hold()
    until(lambda: node.knows(R1), "the hold")
    node.node.reject(R1, A1, "too long for us")
    assert how_ended(node) is How.REJECTED
    ranks[1].hold()
    ranks[1].got.until(lambda: bool(ranks[1].got.failures(T1)), "the rejection")
    assert "too long for us" in ranks[1].got.failures(T1)[0].reason


def test_a_slow_rank_holds_up_nobody_but_itself(
    make_node: MakeNode, make_decode: MakeDecode
) -> None:
    page_bytes = 1 << 20
    node = make_node(page_bytes=page_bytes, send_queue_pages_max=2)
    tokens = prompt_of(40).tokens
    with RawRank(node.address, rank=0, n_ranks=2, page_bytes=page_bytes, rcvhwm=1) as slow:
        assert isinstance(slow.greet(), wire.Welcome)
        slow.hold(R1, tokens)
        slow.want(R1, 0, 40, 0)
        quick = make_decode(
            node.address, rank=1, n_ranks=2, memory={"n_pages": 40, "page_bytes": page_bytes}
        )
        quick.hold(prompt=prompt_of(40))
        quick.peers.send_want(T1, 0, list(range(40)), 0)
        until(lambda: node.knows(R1), "the hold")
        node.node.page_ready(R1, A1, 40)
        quick.got.until_pages(T1, 40)
        n_sent = sum(rank == 0 for _, _, rank in node.pages.asked)
        assert n_sent < 40, "the slow rank has not taken its pages"
        for position in range(40):
            page = slow.hear()
            assert isinstance(page.message, wire.Page)
            assert page.message.position == position


# -- leases --------------------------------------------------------------------------------------


def test_a_heartbeat_keeps_the_lease_of_a_request_that_only_waits(
    make_node: MakeNode, make_decode: MakeDecode
) -> None:
    node = make_node(lease_s=0.5)
    rank = make_decode(node.address)
    rank.hold()
    until(lambda: node.knows(R1), "the hold")
    time.sleep(1.2)
    assert node.knows(R1)
    node.node.page_ready(R1, A1, 8)
    rank.peers.send_want(T1, 7, [7], 7)
    rank.got.until_pages(T1, 1)


def test_a_rank_that_renews_nothing_loses_its_lease_and_is_answered_gone(
    make_node: MakeNode,
) -> None:
    node = make_node(lease_s=20.0)
    with RawRank(node.address, lease_s=0.3) as rank:
        welcome = rank.greet()
        assert welcome == wire.Welcome(0.3), "the shorter of both leases is granted"
        rank.hold(R1, prompt_of(2).tokens)
        until(lambda: node.knows(R1), "the hold")
        assert how_ended(node) is How.LEASE_ENDED
        assert rank.hear().message == wire.Gone(R1, A1)
        rank.want(R1, 0, 2, 0)
        assert rank.hear().message == wire.Gone(R1, A1)
        assert node.pages.asked == []


def test_a_rank_that_never_joins_does_not_pin_a_request(make_node: MakeNode) -> None:
    node = make_node(lease_s=0.3)
    with RawRank(node.address, n_ranks=2) as rank:
        rank.greet()
        rank.hold(R1, prompt_of(2).tokens)
        until(lambda: node.knows(R1), "the hold")
        rank.say(wire.Aborted(R1, A1))
        assert rank.hear().message == wire.AbortedAck(R1, A1)
        assert how_ended(node) is How.LEASE_ENDED


def test_an_abort_of_an_unknown_request_is_confirmed(make_node: MakeNode) -> None:
    node = make_node()
    with RawRank(node.address) as rank:
        rank.greet()
        rank.say(wire.Aborted(R1, A1))
        assert rank.hear().message == wire.AbortedAck(R1, A1)


def test_a_vanished_rank_is_noticed_before_its_lease_ends(make_node: MakeNode) -> None:
    node = make_node(lease_s=60.0)
    with RawRank(node.address) as rank:
        rank.greet()
        rank.hold(R1, prompt_of(2).tokens)
        until(lambda: node.knows(R1), "the hold")
    assert how_ended(node) is How.LOST


def test_a_new_life_of_a_named_worker_ends_the_requests_of_the_old_one(
    make_node: MakeNode,
) -> None:
    node = make_node()
    with RawRank(node.address, group="decode-0") as old:
        old.greet()
        old.hold(R1, prompt_of(2).tokens)
        until(lambda: node.knows(R1), "the hold")
        with (
            RawRank(node.address, group="decode-1") as other,
            RawRank(node.address, group="decode-0") as new,
        ):
            other.greet()
            other.hold(R1, prompt_of(2).tokens)
            answer = other.hear().message
            assert isinstance(answer, wire.Rejected)
            assert "another decode worker" in answer.reason
            new.greet()
            assert how_ended(node) is How.LOST
            old.say(wire.Renew())
            refused = old.hear().message
            assert isinstance(refused, wire.Refused)
            assert refused.cause == "session"


def test_nothing_is_reported_for_a_request_that_ended_before_it_was_announced(
    make_node: MakeNode,
) -> None:
    node = make_node()
    with RawRank(node.address) as rank:
        rank.greet()
        rank.hold(R1, prompt_of(2).tokens)
        rank.say(wire.Aborted(R1, A1))
        assert rank.hear().message == wire.AbortedAck(R1, A1)
        node.hear()
        assert node.asked == []
        assert node.ended == []


def test_pages_are_not_given_back_while_a_send_may_still_read_them(make_node: MakeNode) -> None:
    page_bytes = 1 << 20
    node = make_node(page_bytes=page_bytes, send_queue_pages_max=16)
    with RawRank(node.address, page_bytes=page_bytes, rcvhwm=1) as stuck:
        stuck.greet()
        stuck.hold(R1, prompt_of(64).tokens)
        stuck.want(R1, 0, 64, 0)
        until(lambda: node.knows(R1), "the hold")
        node.node.page_ready(R1, A1, 64)
        until(lambda: len(node.pages.asked) > 8, "some pages on their way")
        stuck.say(wire.Aborted(R1, A1))
        time.sleep(0.3)
        n_asked = len(node.pages.asked)
        assert n_asked < 64
        assert node.knows(R1), "libzmq still holds some of its pages"
        time.sleep(0.1)
        assert len(node.pages.asked) == n_asked, "an abort stops the sending"
        while isinstance(stuck.hear().message, wire.Page):
            pass
        assert how_ended(node) is How.ABORTED


# -- bad input and limits --------------------------------------------------------------------------


def test_random_bytes_before_and_after_the_greeting_hurt_nobody(
    make_node: MakeNode, make_decode: MakeDecode
) -> None:
    node = make_node()
    dice = random.Random(20)
    with RawRank(node.address) as rude:
        for _ in range(200):
            n_frames = dice.randint(1, 5)
            rude.say_raw(*(dice.randbytes(dice.randint(0, 300)) for _ in range(n_frames)))
        assert isinstance(rude.greet(), wire.Welcome)
        header = wire.encoded(wire.Hold(R1, A1, bytes(32), 4))
        for frames in (
            [header],
            [header, b"odd"],
            [header, b"", b""],
            [wire.encoded(wire.Renew()), b"payload"],
            [wire.encoded(wire.Alive(rude.hello.incarnation))],
            [header[:-1]],
            [b"\xc1" * 9_000],
        ):
            rude.say_raw(*frames)
        until(lambda: node.node.n_messages_refused == 207, "207 refused messages")
    rank = make_decode(node.address)
    rank.hold()
    until(lambda: node.knows(R1), "the hold")


def test_a_frame_above_the_limit_closes_that_connection_alone(
    make_node: MakeNode, make_decode: MakeDecode
) -> None:
    node = make_node(tokens_bytes_max=100_000)
    rank = make_decode(node.address)
    rank.hold(T1, R1)
    until(lambda: node.knows(R1), "the hold")
    with RawRank(node.address) as rude:
        rude.greet()
        rude.hold("big", bytes(200_000))
        rude.hold("next", bytes(16))
        rank.got.quiet()
        assert not node.knows("big")
    assert node.knows(R1)
    assert rank.got.failures(T1) == []


def test_nobody_is_heard_before_the_proof(make_node: MakeNode) -> None:
    node = make_node()
    with RawRank(node.address) as rank:
        rank.hold(R1, prompt_of(1).tokens)
        answer = rank.hear().message
        assert isinstance(answer, wire.Refused)
        rank.say(rank.hello)
        assert isinstance(rank.hear().message, wire.Challenge)
        rank.hold(R1, prompt_of(1).tokens)
        assert isinstance(rank.hear().message, wire.Refused)
        assert not node.knows(R1)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"layout": "other"}, "mismatch"),
        ({"protocol": 99}, "mismatch"),
        ({"model": "llama"}, "mismatch"),
        ({"rank": 3, "n_ranks": 2}, "mismatch"),
        ({"n_ranks": 65}, "limit"),
    ],
)
def test_a_rank_that_does_not_fit_is_refused(
    make_node: MakeNode, changes: dict[str, Any], cause: str
) -> None:
    node = make_node()
    with RawRank(node.address) as rank:
        rank.hello = type(rank.hello)(
            **{name: getattr(rank.hello, name) for name in rank.hello.__struct_fields__} | changes
        )
        answer = rank.greet()
        assert isinstance(answer, wire.Refused)
        assert answer.cause == cause


@pytest.mark.parametrize(
    "wants",
    [
        [(0, 3, 0)],
        [(0, 2, 3)],
        [(0, 1, 0), (0, 2, 0)],
        [(2, 0, 2)] * 257,
    ],
)
def test_wants_that_cannot_be_served_reject_the_request(
    make_node: MakeNode, wants: list[tuple[int, int, int]]
) -> None:
    node = make_node()
    with RawRank(node.address) as rank:
        rank.greet()
        rank.hold(R1, prompt_of(2).tokens)
        until(lambda: node.knows(R1), "the hold")
        for want in wants:
            rank.want(R1, *want)
        assert isinstance(rank.hear().message, wire.Rejected)
        assert how_ended(node) is How.REJECTED


def test_limits_on_requests_and_tokens_are_reasons_not_crashes(make_node: MakeNode) -> None:
    node = make_node(requests_max=2, tokens_bytes_total_max=200)
    with RawRank(node.address) as rank:
        rank.greet()
        rank.hold("big", bytes(204))
        assert "tokens_bytes_total_max" in _reason(rank)
        rank.hold("a", bytes(100))
        rank.hold("b", bytes(100))
        rank.hold("c", b"")
        assert "requests_max" in _reason(rank)
        rank.say(wire.Committed(Rid("a"), A1))
        rank.hold("d", bytes(100))
        until(lambda: node.knows("d"), "room again")


def _reason(rank: RawRank) -> str:
    answer = rank.hear().message
    assert isinstance(answer, wire.Rejected)
    return answer.reason


class _BrokenPages(PlainPages):
    def page_bytes_for(self, rid: Rid, position: int, rank: int, n_ranks: int) -> bytes:
        if position == 1:
            raise KeyError(rid)
        return page_content(rid, position, rank)[: PAGE_BYTES // (1 + (position == 2))]


@pytest.mark.parametrize(("start", "says"), [(1, "could not give page 1"), (2, "decode pages")])
def test_a_page_that_the_engine_cannot_give_ends_its_request_alone(
    make_node: MakeNode, make_decode: MakeDecode, start: int, says: str
) -> None:
    node = make_node(source=_BrokenPages())
    rank = make_decode(node.address)
    rank.hold(T1, R1)
    rank.hold(T2, Rid("two"))
    rank.peers.send_want(T1, start, [0], 0)
    until(lambda: node.knows(R1) and node.knows("two"), "the holds")
    node.node.page_ready(R1, A1, 8)
    rank.got.until(lambda: bool(rank.got.failures(T1)), "the rejection")
    assert says in rank.got.failures(T1)[0].reason
    rank.peers.send_want(T2, 3, [3], 3)
    node.node.page_ready(Rid("two"), A1, 8)
    rank.got.until_pages(T2, 1)


def test_the_engines_mistakes_are_errors_and_its_late_words_are_not(
    make_node: MakeNode, make_decode: MakeDecode
) -> None:
    node = make_node()
    rank = make_decode(node.address)
    rank.hold()
    until(lambda: node.knows(R1), "the hold")
    with pytest.raises(ValueError, match="8"):
        node.node.page_ready(R1, A1, 9)
    with pytest.raises(ValueError, match="token"):
        node.node.first_token(R1, A1, -1, 0.0)
    late = Rid("never heard of")
    node.node.page_ready(late, A1, 5)
    node.node.first_token(late, A1, 5, 0.0)
    node.node.reject(late, A1, "late")
    node.node.expire(late, A1)
    rank.got.quiet()
    assert node.knows(R1)


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://[::]:5555"])
def test_an_open_address_needs_keys_or_an_explicit_word(bind: str) -> None:
    with pytest.raises(ValueError, match="insecure=True"):
        PrefillNode(bind, LAYOUT, PlainPages())


def test_an_open_address_may_be_bound_when_it_is_said_so(make_node: MakeNode) -> None:
    assert make_node("tcp://0.0.0.0:*", insecure=True).address


def test_an_address_that_is_taken_is_a_sentence(make_node: MakeNode) -> None:
    node = make_node()
    with pytest.raises(ValueError, match="cannot bind"):
        PrefillNode(node.address, LAYOUT, PlainPages())


def test_a_socket_file_serves_and_is_private(
    make_node: MakeNode, make_decode: MakeDecode, tmp_path: Path
) -> None:
    node = make_node(f"ipc://{tmp_path}/node")
    assert stat.S_IMODE((tmp_path / "node").stat().st_mode) == 0o600
    rank = make_decode(node.address)
    rank.hold()
    rank.peers.send_want(T1, 0, [0], 0)
    until(lambda: node.knows(R1), "the hold")
    node.node.page_ready(R1, A1, 1)
    rank.got.until_pages(T1, 1)


def test_closing_the_node_ends_every_request(make_node: MakeNode, make_decode: MakeDecode) -> None:
    node = make_node()
    rank = make_decode(node.address)
    rank.hold()
    until(lambda: node.knows(R1), "the hold")
    assert node.node.close(5)
    assert how_ended(node) is How.CLOSED
    rank.got.until_let_go(T1)


# -- real processes --------------------------------------------------------------------------------


@contextlib.contextmanager
def prefill_process(bind: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.prefill_process", bind],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def test_a_killed_prefill_process_fails_what_is_under_way_and_serves_again_when_it_is_back(
    make_decode: MakeDecode,
) -> None:
    with prefill_process("tcp://127.0.0.1:*") as (process, address):
        rank = make_decode(address, memory={"n_pages": 200})
        rank.hold(prompt=prompt_of(200))
        rank.peers.send_want(T1, 0, list(range(200)), 0)
        rank.got.until(lambda: rank.got.n_pages(T1) >= 3, "the first pages")
        process.send_signal(signal.SIGKILL)
        rank.got.until_let_go(T1)
        (failure,) = rank.got.failures(T1)
        assert failure.cause is PeerCause.LOST
        n_pages = rank.got.n_pages(T1)
        assert 3 <= n_pages < 200
        assert all(rank.memory.pages[at] == page_content(R1, at) for at in range(n_pages))
    with prefill_process(address):
        rank.peers.send_hold(T2, R1, Attempt(2), address, prompt_of(3))
        rank.peers.send_want(T2, 0, [0, 1, 2], 0)
        rank.got.until_pages(T2, 3)


def test_a_stopped_prefill_process_is_silent_and_goes_on_when_it_is_continued(
    make_decode: MakeDecode,
) -> None:
    with prefill_process("tcp://127.0.0.1:*") as (process, address):
        rank = make_decode(address, peer_dead_s=0.5)
        rank.hold()
        rank.peers.send_want(T1, 0, [0], 0)
        rank.got.until_pages(T1, 1)
        process.send_signal(signal.SIGSTOP)
        rank.got.until(lambda: bool(rank.got.failures(T1)), "the failure")
        assert "silent" in rank.got.failures(T1)[0].reason
        rank.peers.send_aborted(T1)
        rank.got.quiet()
        assert rank.got.n_let_go(T1) == 0
        process.send_signal(signal.SIGCONT)
        rank.got.until_let_go(T1)
        rank.hold(T2, Rid("two"))
        rank.peers.send_want(T2, 0, [0], 0)
        rank.got.until_pages(T2, 1)
