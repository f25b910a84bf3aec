import random
import secrets
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.landed import PeerCause, PeerFailed, TokenArrived
from kvlift.core.prompt import Prompt
from kvlift.effects import wire
from kvlift.effects.peers import ZmqPeers
from kvlift.effects.wire_security import CurveClient, CurveServer, SharedSecret, curve_pair
from tests.effects.peers_conformance import (
    A1,
    R1,
    T1,
    T2,
    Gathered,
    PeersConformance,
    got,
    prompt_of,
)
from tests.effects.raw_wire import RawNode
from tests.effects.wire_world import LAYOUT, Node, PlainMemory, ZmqWorld, page_content, zmq_peers

__all__ = ["got"]


@pytest.fixture
def world() -> Iterator[ZmqWorld]:
    one = ZmqWorld()
    yield one
    one.close()


class TestZmqPeers(PeersConformance):
    """The port over real sockets."""


class _Rank:
    """A decode rank alone, for a peer that the test brings along."""

    def __init__(self, address: str, **options: object) -> None:
        self.memory = PlainMemory()
        self.peers = zmq_peers(self.memory, **options)
        self.address = address

    def step(self) -> None:
        time.sleep(0.005)


@pytest.fixture
def raw() -> Iterator[RawNode]:
    with RawNode() as node:
        yield node


MakeRank = Callable[..., tuple[_Rank, Gathered]]


@pytest.fixture
def make_rank() -> Iterator[MakeRank]:
    ranks: list[_Rank] = []

    def make(address: str, **options: object) -> tuple[_Rank, Gathered]:
        rank = _Rank(address, **options)
        ranks.append(rank)
        return rank, Gathered(rank)  # type: ignore[arg-type]

    yield make
    for rank in ranks:
        assert rank.peers.close(5)


def _held(raw: RawNode, make_rank: MakeRank, **options: object) -> tuple[_Rank, Gathered]:
    """A rank that holds request R1 (8 pages) and wants pages 4 to 7 at the places 4 to 7."""
    rank, got = make_rank(raw.address, **options)
    rank.peers.send_hold(T1, R1, A1, raw.address, prompt_of(8))
    rank.peers.send_want(T1, 4, [4, 5, 6, 7], 4)
    raw.greet()
    heard = raw.hear_kind(wire.Hold)
    assert bytes(heard.payload) == prompt_of(8).tokens
    want = raw.hear_kind(wire.Want).message
    assert want == wire.Want(R1, A1, start=4, n_pages=4, promise=4)
    return rank, got


def _only_failure(got: Gathered, ticket: Ticket = T1) -> PeerFailed:
    got.until(lambda: bool(got.failures(ticket)), "a failure")
    (failure,) = got.failures(ticket)
    assert got.world.address in failure.reason
    return failure


# -- what a node may say, in any order and number ---------------------------------------------


def test_pages_are_written_once_and_counted_in_the_order_of_asking(
    raw: RawNode, make_rank: MakeRank
) -> None:
    rank, got = _held(raw, make_rank)
    for position in (6, 6, 5, 2, 99, 4, 4):
        raw.page(R1, position, page_content(R1, position))
    raw.page("stranger", 7, page_content("stranger", 7))
    got.until_pages(T1, 3)
    raw.page(R1, 7, page_content(R1, 7))
    got.until_pages(T1, 4)
    assert rank.memory.written == [6, 5, 4, 7]
    assert all(rank.memory.pages[at] == page_content(R1, at) for at in (4, 5, 6, 7))


def test_a_first_token_counts_once(raw: RawNode, make_rank: MakeRank) -> None:
    _, got = _held(raw, make_rank)
    for token in (7, 8):
        raw.say(wire.FirstToken(R1, A1, token=token, logprob=-1.5))
    got.until(lambda: bool(got.reports), "the token")
    got.quiet()
    assert got.reports == [TokenArrived(T1, 7, -1.5)]


def test_a_page_that_comes_between_abort_and_acknowledgement_is_not_written(
    raw: RawNode, make_rank: MakeRank
) -> None:
    rank, got = _held(raw, make_rank)
    rank.peers.send_aborted(T1)
    raw.hear_kind(wire.Aborted)
    raw.page(R1, 4, page_content(R1, 4))
    raw.say(wire.AbortedAck(R1, A1))
    got.until_let_go(T1)
    raw.say(wire.AbortedAck(R1, A1))
    raw.page(R1, 5, page_content(R1, 5))
    got.quiet()
    assert rank.memory.written == []
    assert got.n_let_go(T1) == 1
    assert got.failures(T1) == []


def test_a_damaged_page_is_not_written_and_fails_its_request(
    raw: RawNode, make_rank: MakeRank
) -> None:
    rank, got = _held(raw, make_rank)
    raw.page(R1, 4, page_content(R1, 4), crc32=1)
    failure = _only_failure(got)
    assert failure.cause is PeerCause.LOST
    assert "page 4 was damaged" in failure.reason
    raw.page(R1, 5, page_content(R1, 5))
    got.quiet()
    assert rank.memory.written == [], "nothing is written after a failure was reported"
    assert got.n_let_go(T1) == 0
    rank.peers.send_aborted(T1)
    raw.hear_kind(wire.Aborted)
    raw.say(wire.AbortedAck(R1, A1))
    got.until_let_go(T1)


def test_gone_fails_a_request_that_still_waits_for_pages(raw: RawNode, make_rank: MakeRank) -> None:
    _, got = _held(raw, make_rank)
    raw.say(wire.Gone(R1, A1))
    assert _only_failure(got).cause is PeerCause.GONE
    got.until_let_go(T1)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xff\xff\xff"],
        [b"\x91\xa5renew"],
        [secrets.token_bytes(200)],
        [wire.encoded(wire.Page(R1, A1, position=4, crc32=0))],
        [wire.encoded(wire.Page(R1, A1, position=4, crc32=0)), b"short"],
        [wire.encoded(wire.AbortedAck(R1, A1)), b"a payload where none belongs"],
        [b"\x93\xa4gone" + b"\xd9\xff" + b"a" * 255],
        [b"x", b"y", b"z"] * 50,
        [b"\x00" * 15_000],
    ],
)
def test_a_malformed_message_fails_the_requests_of_its_connection_and_nothing_else(
    raw: RawNode, make_rank: MakeRank, frames: list[bytes]
) -> None:
    rank, got = _held(raw, make_rank)
    raw.say_raw(*frames)
    assert _only_failure(got).cause is PeerCause.LOST
    got.until_let_go(T1)
    assert rank.peers.n_messages_refused == 1
    with_node = Node()
    rank.peers.send_hold(T2, R1, A1, with_node.address, prompt_of(1))
    got.until(lambda: with_node.knows(R1), "a hold at another node")
    assert with_node.node.close(5)


def test_a_frame_above_the_limit_closes_the_connection(raw: RawNode, make_rank: MakeRank) -> None:
    rank, got = _held(raw, make_rank)
    raw.say_raw(b"x" * (rank.memory.page_bytes + 20_000))
    assert _only_failure(got).cause is PeerCause.LOST
    got.until_let_go(T1)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=64), max_size=4))
def test_no_bytes_make_the_parser_do_anything_but_refuse(frames: list[bytes]) -> None:
    views = [memoryview(one) for one in frames]
    for parse in (wire.heard_by_prefill, wire.heard_by_decode):
        try:
            heard = parse(views, 64)
        except wire.BadMessageError:
            continue
        assert wire.encoded(heard.message), "what is not refused is a whole message"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_message_with_a_changed_byte_is_refused_or_still_within_all_limits(
    data: st.DataObject,
) -> None:
    hello = wire.Hello(1, LAYOUT, "m", "g", 0, 2, 64, 3.0, wire.Incarnation(1, 2), bytes(32))
    header = bytearray(wire.encoded(hello))
    header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        heard = wire.heard_by_prefill([memoryview(header)], 64)
    except wire.BadMessageError:
        return
    assert isinstance(heard.message, wire.Hello)
    assert heard.message.rank < wire.N_RANKS_MAX
    assert len(heard.message.layout) <= wire.NAME_CHARS_MAX


# -- dead, silent, restarted, unreachable -------------------------------------------------------


def test_a_silent_peer_fails_its_requests_but_does_not_let_them_go(
    raw: RawNode, make_rank: MakeRank
) -> None:
    rank, got = _held(raw, make_rank, peer_dead_s=0.4)
    failure = _only_failure(got)
    assert failure.cause is PeerCause.LOST
    assert "silent for" in failure.reason
    got.quiet()
    assert got.n_let_go(T1) == 0
    rank.peers.send_hold(T2, Rid("later"), A1, raw.address, prompt_of(1))
    assert _only_failure(got, T2).cause is PeerCause.LOST
    got.until_let_go(T2)
    rank.peers.close_peer(T1)
    got.until_let_go(T1)
    assert len(got.failures(T1)) == 1


def test_heartbeats_keep_a_slow_peer_alive(raw: RawNode, make_rank: MakeRank) -> None:
    _, got = _held(raw, make_rank, peer_dead_s=0.4)
    for _ in range(8):
        raw.say(wire.Alive(raw.incarnation))
        got.quiet(20)
    assert got.failures(T1) == []


def test_what_was_asked_for_while_this_rank_stood_still_blames_nobody(
    raw: RawNode, make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended process: its first deed on waking is a request that was waiting for it."""
    rank, got = _held(raw, make_rank, peer_dead_s=2.0)
    wait = rank.peers._wait

    def stand_still() -> None:
        monkeypatch.setattr(rank.peers, "_wait", wait)
        time.sleep(3.0)

    monkeypatch.setattr(rank.peers, "_wait", stand_still)
    got.quiet(20)
    rank.peers.send_hold(T2, Rid("later"), A1, raw.address, prompt_of(1))
    hold = raw.hear_kind(wire.Hold).message
    assert isinstance(hold, wire.Hold)
    assert hold.rid == "later"
    assert got.failures(T1) == got.failures(T2) == []


def test_another_incarnation_on_the_same_connection_ends_the_old_requests(
    raw: RawNode, make_rank: MakeRank
) -> None:
    rank, got = _held(raw, make_rank)
    raw.incarnation = wire.new_incarnation()
    raw.say(wire.Alive(raw.incarnation))
    failure = _only_failure(got)
    assert failure.cause is PeerCause.LOST
    assert "restarted" in failure.reason
    got.until_let_go(T1)
    rank.peers.send_hold(T2, R1, Attempt(2), raw.address, prompt_of(1))
    raw.greet()
    assert isinstance(raw.hear_kind(wire.Hold).message, wire.Hold)


def test_a_peer_that_was_never_there_is_lost_after_the_timeout(make_rank: MakeRank) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    rank, got = make_rank(address, connect_timeout_s=0.3)
    rank.peers.send_hold(T1, R1, A1, address, prompt_of(1))
    rank.peers.send_want(T1, 0, [0], 0)
    failure = _only_failure(got)
    assert failure.cause is PeerCause.LOST
    assert "no answer within 0.3 s" in failure.reason
    got.until_let_go(T1)


def test_a_server_that_speaks_no_zeromq_is_lost_too(make_rank: MakeRank) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        rank, got = make_rank(address, connect_timeout_s=0.6)
        rank.peers.send_hold(T1, R1, A1, address, prompt_of(1))
        connection, _ = server.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + random.Random(5).randbytes(300))
        connection.close()
        assert _only_failure(got).cause is PeerCause.LOST
        got.until_let_go(T1)


def test_a_node_that_starts_late_is_found(make_rank: MakeRank) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    rank, got = make_rank(address)
    rank.peers.send_hold(T1, R1, A1, address, prompt_of(1))
    got.quiet(40)
    node = Node(address)
    got.until(lambda: node.knows(R1), "the hold")
    assert node.node.close(5)


def test_an_abort_before_the_node_was_reached_is_let_go_at_once(make_rank: MakeRank) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        rank, got = make_rank(address)
        rank.peers.send_hold(T1, R1, A1, address, prompt_of(1))
        rank.peers.send_aborted(T1)
        got.until_let_go(T1)
        assert got.failures(T1) == []


# -- who may speak -------------------------------------------------------------------------------


def test_a_layout_that_differs_is_a_mismatch_that_names_both(make_rank: MakeRank) -> None:
    node = Node(layout="bf16 page=64 layers=8")
    rank, got = make_rank(node.address, layout="bf16 page=16 layers=8")
    rank.peers.send_hold(T1, R1, A1, node.address, prompt_of(1))
    failure = _only_failure(got)
    assert failure.cause is PeerCause.MISMATCH
    assert "bf16 page=64 layers=8" in failure.reason
    assert "bf16 page=16 layers=8" in failure.reason
    got.until_let_go(T1)
    assert not node.knows(R1)
    assert node.node.close(5)


SECRET = SharedSecret(b"correct horse battery staple")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SharedSecret(b"another secret of enough length"), SECRET),
        (None, SECRET),
        (SECRET, None),
    ],
)
def test_ends_without_the_same_secret_refuse_each_other(
    make_rank: MakeRank, ours: SharedSecret | None, theirs: SharedSecret | None
) -> None:
    node = Node(secret=theirs)
    rank, got = make_rank(node.address, secret=ours)
    rank.peers.send_hold(T1, R1, A1, node.address, prompt_of(1))
    failure = _only_failure(got)
    assert failure.cause is PeerCause.REFUSED
    assert "secret" in failure.reason
    assert "horse" not in failure.reason
    got.until_let_go(T1)
    assert not node.knows(R1)
    assert node.node.close(5)


def _serves(rank: _Rank, got: Gathered, node: Node, ticket: Ticket = T1) -> None:
    rid = Rid(f"request {ticket}")
    rank.peers.send_hold(ticket, rid, A1, node.address, prompt_of(1))
    rank.peers.send_want(ticket, 0, [0], 0)
    got.until(lambda: node.knows(rid), "the hold")
    node.node.page_ready(rid, A1, 1)
    got.until_pages(ticket, 1)


def test_ends_with_the_same_secret_serve(make_rank: MakeRank) -> None:
    node = Node(secret=SECRET)
    rank, got = make_rank(node.address, secret=SharedSecret(b"correct horse battery staple"))
    _serves(rank, got, node)
    assert node.node.close(5)


def test_a_secret_shows_itself_nowhere() -> None:
    assert "horse" not in repr(SECRET)
    with pytest.raises(ValueError, match="16 to 1024 bytes"):
        SharedSecret(b"short")
    public, secret = curve_pair()
    assert secret.decode() not in repr(CurveClient(public, secret, public))
    assert secret.decode() not in repr(CurveServer(public, secret, [public]))


def test_curve_serves_the_keys_that_it_lists_and_refuses_others(make_rank: MakeRank) -> None:
    server, known, stranger = curve_pair(), curve_pair(), curve_pair()
    node = Node(curve=CurveServer(*server, clients=[known[0]]))
    rank, got = make_rank(node.address, curve=CurveClient(*known, server=server[0]))
    _serves(rank, got, node)
    other, others = make_rank(node.address, curve=CurveClient(*stranger, server=server[0]))
    other.peers.send_hold(T1, R1, A1, node.address, prompt_of(1))
    assert _only_failure(others).cause is PeerCause.REFUSED
    wrong = curve_pair()
    third, thirds = make_rank(
        node.address, curve=CurveClient(*known, server=wrong[0]), connect_timeout_s=0.5
    )
    third.peers.send_hold(T1, R1, A1, node.address, prompt_of(1))
    assert _only_failure(thirds).cause is PeerCause.LOST
    plain, plains = make_rank(node.address, connect_timeout_s=0.5)
    plain.peers.send_hold(T1, R1, A1, node.address, prompt_of(1))
    assert _only_failure(plains).cause is PeerCause.LOST
    assert node.node.close(5)


# -- limits and misuse ---------------------------------------------------------------------------


def test_one_request_too_many_is_refused_and_the_others_live(make_rank: MakeRank) -> None:
    node = Node()
    rank, got = make_rank(node.address, requests_per_peer_max=2)
    for number in (1, 2, 3):
        rank.peers.send_hold(Ticket(number), Rid(f"r{number}"), A1, node.address, prompt_of(1))
    failure = _only_failure(got, Ticket(3))
    assert failure.cause is PeerCause.REFUSED
    assert "requests_per_peer_max" in failure.reason
    rank.peers.send_committed(T1)
    _serves(rank, got, node, Ticket(4))
    assert node.node.close(5)


@pytest.mark.parametrize(
    ("rid", "peer", "says"),
    [
        ("", "tcp://127.0.0.1:1", "request id"),
        ("a" * 257, "tcp://127.0.0.1:1", "request id"),
        ("\ud800", "tcp://127.0.0.1:1", "Unicode"),
        ("a", "http://127.0.0.1:1", "tcp://host:port"),
        ("a", "tcp://nowhere", "cannot connect"),
        ("a", "tcp://127.0.0.1:1\n", "tcp://host:port"),
    ],
)
def test_what_cannot_travel_is_refused_with_a_sentence(
    make_rank: MakeRank, rid: str, peer: str, says: str
) -> None:
    rank, got = make_rank(wire.tidy(peer))
    rank.peers.send_hold(T1, Rid(rid), A1, peer, prompt_of(1))
    assert says in _only_failure(got).reason
    got.until_let_go(T1)


def test_misuse_of_the_port_is_an_error_of_the_caller(world: ZmqWorld) -> None:
    peers = world.peers
    peers.send_hold(T1, R1, A1, world.address, prompt_of(4))
    with pytest.raises(ValueError, match="used already"):
        peers.send_hold(T1, R1, A1, world.address, prompt_of(4))
    with pytest.raises(ValueError, match="4 pages"):
        peers.send_want(T1, 3, [0, 1], 3)
    with pytest.raises(ValueError, match="device pages"):
        peers.send_want(T1, 3, [16], 3)
    peers.send_want(T1, 3, [3], 3)
    with pytest.raises(ValueError, match="asked for already"):
        peers.send_want(T1, 2, [1, 2], 2)


def test_impossible_settings_are_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="heartbeat_s"):
        ZmqPeers(PlainMemory(), LAYOUT, lease_s=1.0, heartbeat_s=0.9)
    with pytest.raises(ValueError, match="ranks count from 0"):
        ZmqPeers(PlainMemory(), LAYOUT, 2, 2)


class _BrokenMemory(PlainMemory):
    def write_page(self, device_page: int, data: memoryview) -> None:
        raise OSError("the device is gone")


def test_a_bug_on_the_sockets_thread_is_raised_on_the_ticks_thread(raw: RawNode) -> None:
    peers = zmq_peers(_BrokenMemory())
    peers.send_hold(T1, R1, A1, raw.address, prompt_of(1))
    peers.send_want(T1, 0, [0], 0)
    raw.greet()
    raw.hear_kind(wire.Want)
    raw.page(R1, 0, page_content(R1, 0))
    until = time.monotonic() + 5
    with pytest.raises(RuntimeError, match="has stopped"):
        while time.monotonic() < until:
            peers.landed()
            time.sleep(0.01)
    assert peers.close(5)


def test_a_closed_port_says_so_and_had_its_last_words_delivered(make_rank: MakeRank) -> None:
    node = Node()
    peers = zmq_peers()
    peers.send_hold(T1, R1, A1, node.address, prompt_of(1))
    got = Gathered(type("W", (), {"peers": peers, "step": lambda self: time.sleep(0.005)})())
    got.until(lambda: node.knows(R1), "the hold")
    peers.send_committed(T1)
    assert peers.close(5)
    got.until(lambda: not node.knows(R1), "the end")
    assert node.ended[0].how.value == "committed"
    with pytest.raises(RuntimeError, match="closed"):
        peers.send_hold(T2, R1, A1, node.address, Prompt(bytes(32), b"", 4))
    assert node.node.close(5)
