"""The wire: message decoders, and both ends of a conversation without sockets.

An input: one byte for what is fed (0 and 1 the decoders of both ends, 2 and 3 a prefill node
without and with a secret, 4 and 5 a decode rank likewise), then messages: a byte for the number of
frames, and each frame after its length (two bytes, big-endian).
"""

import logging
import zlib
from collections import deque
from random import Random
from typing import Any, Final, cast

import msgspec
import zmq
from attrs import define, field

from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.landed import PagesArrived, PeerCause, PeerFailed, PeerLetGo
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.effects import wire
from kvlift.effects.peers_connection import Connection
from kvlift.effects.peers_conversation import Conversation, Reports, Wanted
from kvlift.effects.peers_settings import PeersSettings, Shared
from kvlift.effects.wire_io import QuietLog, Socket
from kvlift.effects.wire_security import SharedSecret
from kvlift.runtime.prefill_desk import Desk
from kvlift.runtime.prefill_ports import Limits, Outlet
from kvlift.runtime.prefill_requests import How, Request
from kvlift.runtime.prefill_sessions import Terms
from tests.fuzz.mutations import mutated_bytes, mutated_value

PAGE_BYTES: Final = 16
PAGE_TOKENS: Final = 4
N_PAGES: Final = 6
TOKENS_BYTES_MAX: Final = 4096
LEASE_S: Final = 30.0
SECRET: Final = SharedSecret(b"sixteen bytes and some more")
RIDS: Final = ("a", "b", "c")
LIFE: Final = wire.Incarnation(7, 1_700_000_000)
TOKENS: Final = token_bytes(range(N_PAGES * PAGE_TOKENS))
DATA: Final = bytes(range(PAGE_BYTES))
LAST: Final = (PeerCause.LOST, "closed by this rank")


def quiet() -> QuietLog:
    logger = logging.getLogger("kvlift-fuzz")
    logger.setLevel(logging.CRITICAL)
    return QuietLog(logger)


# -- how inputs are written ----------------------------------------------------------------------


def packed(end: int, messages: list[list[bytes]]) -> bytes:
    parts = [bytes([end])]
    for frames in messages:
        parts.append(bytes([len(frames) & 255]))
        parts += [len(frame[:65_535]).to_bytes(2, "big") + frame[:65_535] for frame in frames]
    return b"".join(parts)


def unpacked(data: bytes) -> tuple[int, list[list[bytes]]]:
    """Any bytes are some conversation."""
    messages: list[list[bytes]] = []
    end, at = (data[0] if data else 0), 1
    while at < len(data) and len(messages) < 64:
        n_frames, at = data[at] % 4, at + 1
        frames = []
        for _ in range(n_frames):
            size = int.from_bytes(data[at : at + 2], "big")
            frames.append(data[at + 2 : at + 2 + size])
            at += 2 + size
        messages.append(frames)
    return end % 6, messages


# -- what the ends are made of ---------------------------------------------------------------------


class Sent:
    """In place of libzmq's tracker: everything has been sent."""

    done = True


@define(eq=False)
class FakeRouter:
    """The ROUTER socket of a node: keeps what is said, and is full now and then."""

    draw: Random
    said: list[list[bytes]] = field(factory=list)
    _parts: list[bytes] = field(factory=list)

    def send(self, data: Any, flags: int = 0, **_options: object) -> Sent:
        if not self._parts and flags & zmq.NOBLOCK and self.draw.random() < 0.05:
            if self.draw.random() < 0.8:
                raise zmq.Again
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self._parts.append(bytes(data))
        if not flags & zmq.SNDMORE:
            self.said.append(self._parts)
            self._parts = []
        return Sent()


@define(eq=False)
class FakeFrame:
    buffer: memoryview
    more: bool


@define(eq=False)
class FakeDealer:
    """The DEALER socket of a rank: hears the frames that it is given."""

    heard: deque[FakeFrame]
    said: list[bytes] = field(factory=list)

    def recv(self, _flags: int = 0, **_options: object) -> FakeFrame:
        if not self.heard:
            raise zmq.Again
        return self.heard.popleft()

    def send(self, data: bytes, _flags: int = 0) -> None:
        self.said.append(data)

    def disable_monitor(self) -> None: ...

    def close(self, linger: int) -> None: ...


@define(eq=False)
class FakeMemory:
    """Device pages of which only some are anybody's."""

    n_pages: int = 64
    page_bytes: int = PAGE_BYTES
    written: list[int] = field(factory=list)

    def write_page(self, device_page: int, data: memoryview) -> None:
        assert len(data) == PAGE_BYTES
        self.written.append(device_page)

    def read_page(self, device_page: int, into: memoryview) -> None:
        into[:] = bytes(PAGE_BYTES)


class FakePages:
    def page_bytes_for(self, rid: Rid, position: int, rank: int, n_ranks: int) -> bytes:
        return DATA


# -- the grammar -----------------------------------------------------------------------------------


def _to_prefill(draw: Random) -> list[Any]:
    rid, attempt = Rid(draw.choice(RIDS)), Attempt(draw.randrange(3))
    match draw.randrange(8):
        case 0:
            hello = wire.Hello(
                protocol=wire.PROTOCOL_VERSION,
                layout="l",
                model="m",
                group=draw.choice(("", "g")),
                rank=draw.randrange(2),
                n_ranks=draw.choice((1, 2, 2)),
                page_bytes=PAGE_BYTES,
                lease_s=20.0,
                incarnation=LIFE,
                nonce=bytes(32),
            )
            return [hello]
        case 1:
            return [wire.Proof(draw.choice((b"", b"", bytes(32))))]
        case 2 | 3:
            return [wire.Hold(rid, attempt, bytes(32), PAGE_TOKENS), TOKENS]
        case 4 | 5:
            start = draw.randrange(N_PAGES)
            return [wire.Want(rid, attempt, start, draw.randint(0, N_PAGES - start), 0)]
        case 6:
            return [draw.choice((wire.Committed, wire.Aborted))(rid, attempt)]
        case _:
            return [wire.Renew()]


def _to_decode(draw: Random) -> list[Any]:
    rid, attempt = Rid(draw.choice(RIDS)), Attempt(draw.randrange(3))
    match draw.randrange(9):
        case 0:
            return [wire.Challenge(LIFE, bytes(32), draw.choice((b"", bytes(32))))]
        case 1:
            return [wire.Welcome(draw.choice((30.0, 0.5)))]
        case 2:
            return [wire.Refused(draw.choice(("auth", "mismatch", "limit", "session")), "no")]
        case 3 | 4 | 5:
            page = wire.Page(rid, attempt, draw.randrange(N_PAGES), zlib.crc32(DATA))
            return [page, DATA]
        case 6:
            return [wire.FirstToken(rid, attempt, 5, -0.5)]
        case 7:
            is_gone = draw.random() < 0.5
            return [wire.Gone(rid, attempt) if is_gone else wire.Rejected(rid, attempt, "so")]
        case _:
            return draw.choice(([wire.AbortedAck(rid, attempt)], [wire.Alive(LIFE)]))


OPENINGS: Final[dict[bool, list[list[Any]]]] = {
    True: [
        [wire.Hello(1, "l", "m", "", 0, 1, PAGE_BYTES, 20.0, LIFE, bytes(32))],
        [wire.Proof(b"")],
    ],
    False: [[wire.Challenge(LIFE, bytes(32), b"")], [wire.Welcome(30.0)]],
}


def _frames(draw: Random, parts: list[Any], harm: float) -> list[bytes]:
    """Header and payload, with a chance of harm to each."""
    header = wire.encoded(parts[0])
    if draw.random() < harm:
        value = mutated_value(draw, msgspec.msgpack.decode(header))
        header = msgspec.msgpack.encode(value)
    if draw.random() < harm / 2:
        header = mutated_bytes(draw, header)
    frames = [header, *parts[1:]]
    if len(frames) > 1 and draw.random() < harm:
        frames[1] = mutated_bytes(draw, frames[1])
    if draw.random() < harm / 4:
        frames.insert(draw.randint(0, len(frames)), draw.randbytes(draw.randint(0, 20)))
    return frames[:3]


# -- the surface -----------------------------------------------------------------------------------


class WireSurface:
    name = "wire"

    def made(self, draw: Random) -> bytes:
        end = draw.randrange(6)
        is_to_prefill = end in (0, 2, 3)
        one = _to_prefill if is_to_prefill else _to_decode
        if end < 2:
            return packed(end, [_frames(draw, one(draw), 0.9)])
        harm = draw.choice((0.0, 0.1, 0.3))
        messages = [one(draw) for _ in range(draw.randint(1, 10))]
        if draw.random() < 0.9:
            messages = [*OPENINGS[is_to_prefill], *messages]
        return packed(end, [_frames(draw, parts, harm) for parts in messages])

    def fed(self, data: bytes) -> str:
        end, messages = unpacked(data)
        match end:
            case 0 | 1:
                return self._decoded(end, messages)
            case 2 | 3:
                return hear_as_prefill(messages, SECRET if end == 3 else None, zlib.crc32(data))
            case _:
                return hear_as_decode(messages, SECRET if end == 5 else None)

    def _decoded(self, end: int, messages: list[list[bytes]]) -> str:
        word = "no message"
        for frames in messages:
            views = [memoryview(frame) for frame in frames]
            try:
                if end == 0:
                    heard = wire.heard_by_prefill(views, TOKENS_BYTES_MAX)
                else:
                    heard = wire.heard_by_decode(views, PAGE_BYTES)
            except wire.BadMessageError:
                word = "refused"
                continue
            assert len(wire.encoded(heard.message)) <= wire.HEADER_BYTES_MAX * 2
            word = "understood"
        return word

    def close(self) -> None: ...


def hear_as_prefill(messages: list[list[bytes]], secret: SharedSecret | None, seed: int) -> str:
    """A desk hears two connections by turns, sends what it can, and in the end lets all go."""
    router = FakeRouter(Random(seed))
    terms = Terms(
        layout_fingerprint="l",
        model="m",
        secret=secret,
        lease_s=LEASE_S,
        heartbeat_s=1.0,
        n_ranks_max=4,
        sessions_max=2,
        incarnation=LIFE,
    )
    limits = Limits(
        requests_max=4,
        tokens_bytes_max=TOKENS_BYTES_MAX,
        tokens_bytes_total_max=2 * TOKENS_BYTES_MAX,
        send_queue_pages_max=8,
    )
    asked: list[Request] = []
    ended: list[tuple[Request, How]] = []
    outlet = Outlet(asked=asked.append, ended=lambda request, how: ended.append((request, how)))
    desk = Desk(cast("Socket", router), terms, limits, FakePages(), outlet)
    desk.log = quiet()
    for number, frames in enumerate(messages):
        identity = b"two" if number % 7 == 6 else b"one"
        desk.hear([memoryview(identity), *(memoryview(frame) for frame in frames)], number * 0.01)
        for request in list(desk.requests.values()):
            desk.page_ready(request.key, request.prompt.n_pages)
        desk.pump()
        assert len(desk.requests) <= 4
        assert len(desk.sessions) <= 2
    if secret is not None:
        # Nobody here knows the secret: nothing but challenges and refusals, and nothing is kept.
        assert not desk.sessions
        assert not asked
    for said in router.said:
        answer = wire.heard_by_decode([memoryview(frame) for frame in said[1:]], PAGE_BYTES).message
        assert secret is None or isinstance(answer, wire.Challenge | wire.Refused), answer
    word = "served" if asked else "greeted" if desk.sessions else "not greeted"
    router.draw.seed(0)
    for later_s in (100.0, 200.0, 300.0, 400.0):
        desk.on_time(later_s)
        desk.pump()
        desk.report_ended()
    assert not desk.requests
    assert not desk.sessions
    assert sorted(map(id, asked)) == sorted(id(request) for request, _ in ended)
    return f"{word} by prefill"


def hear_as_decode(messages: list[list[bytes]], secret: SharedSecret | None) -> str:
    """A connection with three requests, the third aborted; hears, and then is closed."""
    memory, reports, over = FakeMemory(), Reports(None), set[Ticket]()
    shared = Shared(
        settings=SETTINGS[secret],
        context=cast("zmq.Context[zmq.Socket[bytes]]", None),
        memory=memory,
        reports=reports,
        log=quiet(),
        incarnation=LIFE,
        ended=over.add,
        wake=lambda: None,
    )
    connection = Connection("tcp://node:1", shared, 0.0)
    connection._hello = shared.hello()
    frames = [
        FakeFrame(memoryview(frame), at < len(message) - 1)
        for message in messages
        for at, frame in enumerate(message)
    ]
    connection.socket = cast("Socket", FakeDealer(deque(frames)))
    prompt = Prompt(bytes(32), TOKENS, PAGE_TOKENS)
    for number, rid in enumerate(RIDS):
        conversation = Conversation(Ticket(number + 1), Rid(rid), Attempt(1), "node", prompt)
        conversation.want(Wanted(1, 3, 1), (10 * number, 10 * number + 1, 10 * number + 2))
        connection.hold(conversation, 0.0)
        if number == 2:
            conversation.revoked = True
            connection.aborted(conversation)
    while connection.read(0.1):
        pass
    is_open = connection._phase.name == "OPEN"
    assert set(memory.written) <= {0, 1, 2, 10, 11, 12}, "a page of nobody was written"
    assert len(memory.written) == len(set(memory.written)), "a page was written twice"
    if secret is not None:
        assert not memory.written, "a node without the secret has written"
        assert not is_open
    connection.on_time(0.2)
    if not connection.is_closed:
        connection.shut(*LAST)
    _check_reports(reports, over, memory)
    return f"{'open' if is_open or memory.written else 'not open'} at decode"


def _check_reports(reports: Reports, over: set[Ticket], memory: FakeMemory) -> None:
    """Every ticket is let go exactly once, failed at most once, and counts what was written."""
    told = reports.taken()
    let_go = [each.ticket for each in told if isinstance(each, PeerLetGo)]
    failed = [each.ticket for each in told if isinstance(each, PeerFailed)]
    assert sorted(let_go) == sorted(over) == [1, 2, 3]
    assert len(failed) == len(set(failed))
    n_arrived = {each.ticket: each.n_pages for each in told if isinstance(each, PagesArrived)}
    for ticket, n_pages in n_arrived.items():
        n_written = sum(page // 10 == ticket - 1 for page in memory.written)
        assert n_pages <= n_written


def _settings(secret: SharedSecret | None) -> PeersSettings:
    return PeersSettings(
        layout_fingerprint="l",
        rank=0,
        n_ranks=1,
        model="m",
        group="",
        secret=secret,
        curve=None,
        lease_s=LEASE_S,
        heartbeat_s=1.0,
        peer_dead_s=5.0,
        connect_timeout_s=5.0,
        idle_close_s=60.0,
        requests_per_peer_max=8,
        peers_max=2,
        receive_queue_bytes_max=1 << 20,
    )


SETTINGS: Final = {secret: _settings(secret) for secret in (None, SECRET)}
