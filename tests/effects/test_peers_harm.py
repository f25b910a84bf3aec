"""The decode end of the wire where this process itself is short of something."""

import errno
import resource
import socket
import threading
import time

import pytest
import zmq

from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.landed import Landed, PeerCause, PeerFailed, PeerLetGo
from kvlift.effects.peers import ZmqPeers
from kvlift.effects.peers_names import is_named
from kvlift.effects.peers_settings import Shared
from kvlift.effects.wire_io import Socket
from kvlift.runtime.prefill import PrefillNode
from tests.effects.store_conformance import PlainPages, prompt_of


def until_let_go(peers: ZmqPeers, n_tickets: int) -> list[Landed]:
    reports: list[Landed] = []
    deadline_s = time.monotonic() + 10
    while sum(isinstance(report, PeerLetGo) for report in reports) < n_tickets:
        assert time.monotonic() < deadline_s, reports
        reports += peers.landed()
        time.sleep(0.005)
    return reports


def hold(peers: ZmqPeers, ticket: int, address: str) -> None:
    peers.send_hold(Ticket(ticket), Rid(f"r{ticket}"), Attempt(0), address, prompt_of(1))


def test_without_a_descriptor_for_a_socket_a_node_is_lost_and_the_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Shared.dealer

    def dealer(shared: Shared, address: str) -> Socket:
        if address.endswith(":1"):
            raise zmq.ZMQError(errno.EMFILE)
        return real(shared, address)

    monkeypatch.setattr(Shared, "dealer", dealer)
    peers = ZmqPeers(PlainPages(4, 64), "layout", connect_timeout_s=0.5)
    hold(peers, 1, "tcp://127.0.0.1:1")
    failed, let_go = until_let_go(peers, 1)
    assert isinstance(failed, PeerFailed)
    assert failed.cause is PeerCause.LOST
    assert "Too many open files" in failed.reason
    assert let_go == PeerLetGo(Ticket(1))
    hold(peers, 2, "tcp://127.0.0.1:2")
    assert "no answer within" in str(until_let_go(peers, 1)[0])
    assert peers.close(5)


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 4096, reason="it takes 2,000 descriptors"
)
def test_as_many_nodes_as_are_allowed_can_be_connected() -> None:
    n_nodes = 400
    peers = ZmqPeers(PlainPages(4, 64), "layout", connect_timeout_s=1.0, peers_max=n_nodes)
    for ticket in range(n_nodes):
        hold(peers, ticket, f"ipc:///nowhere/{ticket}")
    reports = until_let_go(peers, n_nodes)
    reasons = {
        report.reason.partition(": ")[2] for report in reports if isinstance(report, PeerFailed)
    }
    assert reasons == {"no answer within 1 s"}
    assert peers.close(5)


class Source:
    def page_bytes_for(self, *_: object) -> bytes:
        return bytes(64)


def test_a_name_service_that_hangs_makes_no_other_node_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, goes_on = socket.getaddrinfo, threading.Event()

    def getaddrinfo(host: str, *more: object) -> object:
        assert threading.current_thread().name == "kvlift-name"
        goes_on.wait(20)
        return real("localhost", *more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with PrefillNode("tcp://127.0.0.1:*", "layout", Source(), heartbeat_s=0.1) as node:
        peers = ZmqPeers(
            PlainPages(4, 64),
            "layout",
            connect_timeout_s=1.0,
            peer_dead_s=0.5,
            heartbeat_s=0.1,
        )
        hold(peers, 1, node.address)
        hold(peers, 2, "tcp://a.name.that.nobody.answers:5")
        reports = until_let_go(peers, 1)
        assert {report.ticket for report in reports} == {Ticket(2)}
        assert "no answer within 1 s" in str(reports[0])
        goes_on.set()
        hold(peers, 3, f"tcp://a.name:{node.address.rpartition(':')[2]}")
        deadline_s = time.monotonic() + 10
        asked = {asked.rid for asked in node.poll()}
        while Rid("r3") not in asked:
            assert time.monotonic() < deadline_s
            asked |= {asked.rid for asked in node.poll()}
            time.sleep(0.005)
        assert peers.close(5)


@pytest.mark.parametrize(
    ("address", "is_a_name"),
    [
        ("tcp://127.0.0.1:5", False),
        ("tcp://[::1]:5", False),
        ("ipc://host:5", False),
        ("tcp://host:5", True),
        ("tcp://:5", True),
        ("tcp://host", True),
    ],
)
def test_names_are_told_from_numbers(address: str, *, is_a_name: bool) -> None:
    assert is_named(address) is is_a_name


@pytest.mark.parametrize("address", ["tcp://:5", "tcp://host", "tcp://host:x", "tcp://a..b:5"])
def test_a_name_that_is_none_is_a_lost_node(address: str) -> None:
    peers = ZmqPeers(PlainPages(4, 64), "layout", connect_timeout_s=2.0)
    hold(peers, 1, address)
    failed, let_go = until_let_go(peers, 1)
    assert isinstance(failed, PeerFailed)
    assert failed.cause is PeerCause.LOST
    assert let_go == PeerLetGo(Ticket(1))
    assert peers.close(5)
