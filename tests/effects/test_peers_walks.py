"""Random walks of a decode rank's end of the wire: nodes that answer, lie, fall silent and restart.

The sockets are doubles, the thread's turns are taken by hand. A ticket fails once at most, and
after its last word nothing is reported and nothing is written under it.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest
import zmq
from attrs import define, field

from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.landed import PagesArrived, PeerFailed, PeerLetGo, TokenArrived
from kvlift.core.policy import Switch
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.effects import peers as peers_module
from kvlift.effects import peers_connection, wire
from kvlift.effects.checksum import crc32
from kvlift.effects.peers import ZmqPeers
from kvlift.effects.peers_settings import Shared

PAGE_BYTES, N_PLACES, N_ACTS, N_PAGES = 8, 64, 400, 6
PROMPT = Prompt(bytes(32), token_bytes(range(4 * N_PAGES)), 4)


@define(eq=False)
class Frame:
    buffer: bytes
    more: bool


@define(eq=False)
class Node:
    """The other end of one connection: a node that keeps to the protocol, mostly."""

    walk: "Walk"
    said: deque[Frame] = field(factory=deque)
    events: deque[int] = field(factory=deque)
    held: dict[tuple[Rid, Attempt], list[int]] = field(factory=dict)
    is_full: bool = False
    is_closed: bool = False
    linger: int = 0

    def get_monitor_socket(self) -> "Node":
        return self

    def disable_monitor(self) -> None: ...

    def connect(self, _address: str) -> None:
        if self.walk.source.random() < 0.05:
            raise zmq.ZMQError(zmq.EINVAL)

    def close(self, linger: int = 0) -> None:
        self.is_closed = True

    def recv(self, _flags: int = 0, *, copy: bool = True) -> Frame:
        if not self.said:
            raise zmq.Again
        return self.said.popleft()

    def say(self, message: wire.Message, payload: bytes | None = None) -> None:
        self.said.append(Frame(wire.encoded(message), more=payload is not None))
        if payload is not None:
            self.said.append(Frame(payload, more=False))

    def send(self, data: bytes, flags: int = 0) -> None:
        assert not self.is_closed
        if self.is_full and flags & zmq.NOBLOCK:
            raise zmq.Again
        if isinstance(data, bytes) and data == PROMPT.tokens:
            return
        frames = [memoryview(data), *([memoryview(b"")] if flags & zmq.SNDMORE else [])]
        message = wire.heard_by_prefill(frames, 1 << 20).message
        silent = self.walk.is_silent
        match message:
            case wire.Hello() if not silent:
                self.say(wire.Challenge(self.walk.life, bytes(32), b""))
            case wire.Proof() if not silent:
                self.say(wire.Welcome(self.walk.source.choice([2.0, 60.0])))
            case wire.Hold(rid=rid, attempt=attempt):
                self.held[rid, attempt] = []
            case wire.Want(rid=rid, attempt=attempt) as want:
                positions = range(want.start, want.start + want.n_pages)
                self.held.get((rid, attempt), []).extend(positions)
            case wire.Committed(rid=rid, attempt=attempt):
                self.held.pop((rid, attempt), None)
            case wire.Aborted(rid=rid, attempt=attempt):
                self.held.pop((rid, attempt), None)
                if not silent:
                    self.say(wire.AbortedAck(rid, attempt))
            case _:
                pass

    def speak(self) -> None:
        """Whatever a node says next of one of its requests."""
        source = self.walk.source
        if not self.held:
            self.say(wire.Alive(self.walk.life))
            return
        key = source.choice(sorted(self.held))
        match source.randrange(12):
            case 0:
                self.say(wire.FirstToken(*key, token=7, logprob=-0.5))
            case 1 if source.random() < 0.3:
                del self.held[key]
                is_gone = source.random() < 0.5
                self.say(wire.Gone(*key) if is_gone else wire.Rejected(*key, "no"))
            case 2 if source.random() < 0.1:
                self.said.append(Frame(source.randbytes(9), more=source.random() < 0.2))
                if self.said[-1].more:
                    self.said.append(Frame(b"", more=False))
            case 3 if source.random() < 0.3:
                self._page(key, source.randrange(N_PAGES), source.randrange(1 << 32))
            case _ if self.held[key]:
                position = self.held[key].pop(0)
                self._page(key, position, None)
            case _:
                self.say(wire.Alive(self.walk.life))

    def _page(self, key: tuple[Rid, Attempt], position: int, crc: int | None) -> None:
        data = bytes([position]) * PAGE_BYTES
        told = crc32(data) if crc is None else crc
        self.say(wire.Page(*key, position=position, crc32=told), data)


@define(eq=False)
class Talk:
    """What is true of one ticket. `places`: by position, all that were asked for."""

    address: str
    places: dict[int, int] = field(factory=dict)
    order: list[int] = field(factory=list)
    lowest: int = N_PAGES
    is_revoked: bool = False
    has_failed: bool = False
    is_over: bool = False
    n_arrived: int = 0
    n_tokens: int = 0


@define(eq=False)
class Walk:
    source: random.Random
    peers: ZmqPeers = field(init=False)
    now: float = 100.0
    life: wire.Incarnation = field(factory=wire.new_incarnation)
    is_silent: bool = False
    nodes: list[Node] = field(factory=list)
    talks: dict[Ticket, Talk] = field(factory=dict)
    memory: list[int | None] = field(factory=lambda: [None] * N_PLACES)
    free: set[int] = field(factory=lambda: set(range(N_PLACES)))
    page_bytes: int = PAGE_BYTES
    n_pages: int = N_PLACES
    n_written: int = 0

    def __attrs_post_init__(self) -> None:
        self.peers = ZmqPeers(
            cast("Any", self),
            "layout",
            lease_s=8.0,
            heartbeat_s=1.0,
            peer_dead_s=4.0,
            connect_timeout_s=2.0,
            idle_close_s=10.0,
            requests_per_peer_max=self.source.choice([3, 64]),
            peers_max=self.source.choice([1, 64]),
            tells_dropped=self.source.choice(list(Switch)),
        )

    def dealer(self, _address: str) -> Node:
        if self.source.random() < 0.03:
            raise zmq.ZMQError(zmq.ENOTSUP)
        self.nodes.append(Node(self))
        return self.nodes[-1]

    def write_page(self, place: int, data: memoryview) -> None:
        owners = [talk for talk in self.talks.values() if place in talk.places.values()]
        assert len(owners) == 1, "a page that nobody waits for"
        assert not owners[0].is_over, "written after the last word"
        assert not owners[0].has_failed, "written after its failure"
        assert owners[0].places[data[0]] == place
        self.memory[place] = data[0]
        self.n_written += 1

    def read_page(self, place: int, into: memoryview) -> None: ...

    # What the tick does.

    def act(self) -> None:
        living = [ticket for ticket, talk in self.talks.items() if not talk.is_over]
        match self.source.randrange(10):
            case 0 | 1:
                ticket = Ticket(len(self.talks) + 1)
                address = f"tcp://10.0.0.{self.source.randrange(2)}:1"
                self.talks[ticket] = Talk(address)
                rid = Rid(f"r{self.source.randrange(3)}")
                self.peers.send_hold(ticket, rid, Attempt(int(ticket)), address, PROMPT)
            case 2 | 3 if living:
                self._want(self.source.choice(living))
            case 4 if living:
                self._leave(self.source.choice(living))
            case 5 if living and self.source.random() < 0.1:
                self.peers.close_peer(self.source.choice(living))
            case 6:
                self._weather()
            case _:
                for node in self.nodes:
                    if not node.is_closed and not self.is_silent:
                        node.speak()
        self.turn(0.02 if self.source.random() < 0.9 else self.source.choice([0.5, 3.0]))

    def _want(self, ticket: Ticket) -> None:
        talk = self.talks[ticket]
        start = self.source.randrange(talk.lowest + 1)
        positions = range(start, talk.lowest)
        if talk.is_revoked or len(self.free) < len(positions):
            return
        places = self.source.sample(sorted(self.free), len(positions))
        self.free -= set(places)
        talk.places.update(zip(positions, places, strict=True))
        talk.order.extend(positions)
        talk.lowest = start
        self.peers.send_want(ticket, start, places, 0)

    def _leave(self, ticket: Ticket) -> None:
        talk = self.talks[ticket]
        if talk.is_revoked:
            return
        talk.is_revoked = True
        if talk.n_arrived == len(talk.order) and not talk.has_failed and self.source.random() < 0.7:
            self.peers.send_committed(ticket)
            talk.is_over = True
            self._give_back(talk)
        else:
            self.peers.send_aborted(ticket)

    def _give_back(self, talk: Talk) -> None:
        self.free |= set(talk.places.values())
        talk.places.clear()

    def _weather(self) -> None:
        self.is_silent = self.source.random() < 0.2
        for node in self.nodes:
            node.is_full = self.source.random() < 0.2
            if self.source.random() < 0.1:
                node.events.append(
                    self.source.choice(
                        [
                            zmq.EVENT_DISCONNECTED,
                            zmq.EVENT_HANDSHAKE_FAILED_AUTH,
                            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
                        ]
                    )
                )
        if self.source.random() < 0.1:
            self.life = wire.new_incarnation()

    # The thread's turn, as `ZmqPeers._turn`.

    def turn(self, spent_s: float) -> None:
        self.now += spent_s
        peers = self.peers
        peers._obey(self.now)
        for connection in tuple(peers._connections.values()):
            has_more = connection.read(self.now)
            connection.flush()
            if not has_more:
                connection.watch(self.now)
            if not connection.is_closed:
                connection.on_time(self.now)
            if connection.is_closed:
                peers._bury(connection)
        if self.source.random() < 0.7:
            self.hear()

    def hear(self) -> None:
        for report in self.peers.landed():
            talk = self.talks[report.ticket]
            if talk.is_over and talk.is_revoked and not isinstance(report, PeerLetGo):
                continue  # it was committed while this was on its way
            match report:
                case PeerFailed():
                    assert not talk.has_failed, "it failed twice"
                    talk.has_failed = True
                case PeerLetGo():
                    assert not talk.is_over or talk.is_revoked, "two last words"
                    talk.is_over = True
                    self._give_back(talk)
                case PagesArrived(n_pages=n_pages):
                    assert talk.n_arrived < n_pages <= len(talk.order)
                    talk.n_arrived = n_pages
                    for position in talk.order[:n_pages]:
                        assert self.memory[talk.places[position]] == position
                case TokenArrived():
                    talk.n_tokens += 1
                    assert talk.n_tokens == 1
                case _:
                    raise AssertionError(report)

    def end(self) -> None:
        for ticket, talk in self.talks.items():
            if not talk.is_over and not talk.is_revoked:
                talk.is_revoked = True
                self.peers.send_aborted(ticket)
        self.is_silent = True
        for ticket, talk in self.talks.items():
            if not talk.is_over:
                self.peers.close_peer(ticket)
        for _ in range(60):
            self.turn(0.5)
        self.hear()
        assert all(talk.is_over for talk in self.talks.values())
        assert not self.peers._conversations
        assert not self.peers._connections
        assert all(node.is_closed for node in self.nodes)


def events_of(node: Node, _flags: int) -> dict[str, int]:
    if not node.events:
        raise zmq.Again
    return {"event": node.events.popleft()}


def not_started(_live: Callable[[], None]) -> None: ...


@pytest.mark.parametrize("seed", range(60))
def test_after_its_last_word_nothing_is_said_or_written_under_a_ticket(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "_started", not_started)
    monkeypatch.setattr(peers_connection, "recv_monitor_message", events_of)
    monkeypatch.setattr(peers_connection, "views", buffers)
    walk = Walk(random.Random(seed))
    monkeypatch.setattr(Shared, "dealer", lambda _shared, address: walk.dealer(address))
    for _ in range(N_ACTS):
        walk.act()
    walk.end()
    walk.peers._waker.close()
    walk.peers._shared.context.term()


def buffers(frames: Iterable[Frame]) -> list[memoryview]:
    return [memoryview(frame.buffer) for frame in frames]
