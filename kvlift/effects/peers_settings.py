"""How a decode rank behaves on the wire, and what its connections have in common."""

import secrets
from collections.abc import Callable

import zmq
from attrs import field, frozen
from attrs.validators import ge, gt, le

from kvlift.core.ids import Ticket
from kvlift.core.policy import Switch
from kvlift.effects import wire
from kvlift.effects.peers_conversation import Reports
from kvlift.effects.ports import DeviceMemory
from kvlift.effects.wire_io import Context, QuietLog, Socket
from kvlift.effects.wire_security import CurveClient, SharedSecret


@frozen(kw_only=True)
class PeersSettings:
    """How a decode rank behaves on the wire; `ZmqPeers` documents each field."""

    layout_fingerprint: str
    rank: int = field(validator=[ge(0), le(wire.N_RANKS_MAX - 1)])
    n_ranks: int = field(validator=[ge(1), le(wire.N_RANKS_MAX)])
    model: str
    group: str
    secret: SharedSecret | None
    curve: CurveClient | None
    lease_s: float = field(validator=[gt(0), le(86_400)])
    heartbeat_s: float = field(validator=gt(0))
    peer_dead_s: float = field(validator=gt(0))
    connect_timeout_s: float = field(validator=gt(0))
    idle_close_s: float = field(validator=gt(0))
    requests_per_peer_max: int = field(validator=ge(1))
    peers_max: int = field(validator=ge(1))
    receive_queue_bytes_max: int = field(validator=ge(1))
    tells_dropped: Switch = Switch.OFF

    def __attrs_post_init__(self) -> None:
        if self.rank >= self.n_ranks:
            raise ValueError(f"rank {self.rank} of {self.n_ranks} ranks: ranks count from 0")
        if self.heartbeat_s * 2 > min(self.lease_s, self.peer_dead_s):
            raise ValueError(
                f"heartbeat_s={self.heartbeat_s:g} is too slow for lease_s={self.lease_s:g} and "
                f"peer_dead_s={self.peer_dead_s:g}: at least two heartbeats must fit into each"
            )
        names = ("layout_fingerprint", self.layout_fingerprint), ("model", self.model)
        for name, text in (*names, ("group", self.group)):
            if len(text) > wire.NAME_CHARS_MAX:
                raise ValueError(f"{name} has more than {wire.NAME_CHARS_MAX} characters")


@frozen(kw_only=True)
class Shared:
    """What all connections of one decode rank have in common."""

    settings: PeersSettings
    context: Context
    memory: DeviceMemory
    reports: Reports
    log: QuietLog
    incarnation: wire.Incarnation
    ended: Callable[[Ticket], None]
    """Nothing more is said about this ticket."""

    wake: Callable[[], None]
    """Any thread: the sockets' thread shall look around."""

    def hello(self) -> wire.Hello:
        """The first words of a new connection, with a nonce that is never used again."""
        settings = self.settings
        return wire.Hello(
            protocol=wire.PROTOCOL_VERSION,
            layout=settings.layout_fingerprint,
            model=settings.model,
            group=settings.group,
            rank=settings.rank,
            n_ranks=settings.n_ranks,
            page_bytes=self.memory.page_bytes,
            lease_s=settings.lease_s,
            incarnation=self.incarnation,
            nonce=secrets.token_bytes(32),
        )

    def dealer(self, address: str) -> Socket:
        """A new socket whose queue and messages are bounded."""
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = 1_000
        queue_pages = self.settings.receive_queue_bytes_max // self.memory.page_bytes
        socket.rcvhwm = min(1_024, max(4, queue_pages))
        frame_bytes_max = max(wire.HEADER_BYTES_MAX, self.memory.page_bytes)
        socket.maxmsgsize = frame_bytes_max + wire.SEAL_BYTES_MAX
        socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 1_000
        socket.ipv6 = "[" in address  # only there: `localhost` would become ::1
        if self.settings.curve is not None:
            self.settings.curve.dress(socket)
        return socket
