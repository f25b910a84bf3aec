"""The decode end of the wire: the `Peers` port over ZeroMQ.

One thread owns every socket. The tick's thread only appends commands and takes reports; it never
touches a socket and never waits. Pages go from the receive buffer of libzmq straight into device
memory, on that thread, and nowhere else.
"""

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import zmq
from attrs import frozen

from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.landed import Landed, PeerCause, PeerFailed, PeerLetGo
from kvlift.core.policy import Switch
from kvlift.core.prompt import Prompt
from kvlift.effects import wire
from kvlift.effects.patience import Pauses
from kvlift.effects.peers_connection import Connection
from kvlift.effects.peers_conversation import Conversation, Reports, Wanted
from kvlift.effects.peers_settings import PeersSettings, Shared
from kvlift.effects.ports import DeviceMemory
from kvlift.effects.wire_io import Context, QuietLog, Waker
from kvlift.effects.wire_security import CurveClient, SharedSecret

_LOG = logging.getLogger(__name__)

LINGER_S_MAX = 1.0
"""How long the last `Committed` and `Aborted` may take to leave when the port is closed."""

SOCKETS_MAX = 65_535
"""More than these no context of libzmq has."""


@frozen
class _Hold:
    conversation: Conversation


@frozen
class _Want:
    conversation: Conversation
    wanted: Wanted
    device_pages: tuple[int, ...]


@frozen
class _Commit:
    conversation: Conversation


@frozen
class _Abort:
    conversation: Conversation


@frozen
class _ClosePeer:
    address: str


_Command: TypeAlias = _Hold | _Want | _Commit | _Abort | _ClosePeer


class ZmqPeers:
    """All prefill nodes of one decode rank, each named by its address (`tcp://` or `ipc://`).

    - `layout_fingerprint`, `model`: must be equal on both ends (`MISMATCH` names both).
    - `group`: the name of this decode worker, the same on all its ranks. With it, a restarted
      worker ends the requests of its former life at once; without it they end with their lease.
      Workers that share a node need names: request ids are their clients' and may be equal.
    - `secret`, `curve`: see `effects.wire_security`.
    - `lease_s`: the lease asked for; the node may grant less, and the heartbeat follows.
    - `peer_dead_s`: a connected node that says nothing for so long has failed its requests (LOST).
      They are let go when it confirms, when its connection closes, or by `close_peer`.
    - `connect_timeout_s`: for the whole greeting of a node, of which the first hold is the start.
    - `requests_per_peer_max`: one more is `REFUSED`, so that the host can send it elsewhere.
    - `receive_queue_bytes_max`: pages of one node that may wait here to be written.
    - `tells_dropped`: a node hears of a request also where it was given up before the connection
      stood: for nodes that keep a prompt before anybody asks for it.
    - `on_landed`: called on the socket's thread after each report; must return at once.
    """

    _linger_s: float | None
    _crash: BaseException | None

    def __init__(
        self,
        memory: DeviceMemory,
        layout_fingerprint: str,
        rank: int = 0,
        n_ranks: int = 1,
        *,
        model: str = "",
        group: str = "",
        secret: SharedSecret | None = None,
        curve: CurveClient | None = None,
        lease_s: float = 30.0,
        heartbeat_s: float = 1.0,
        peer_dead_s: float = 10.0,
        connect_timeout_s: float = 5.0,
        idle_close_s: float = 120.0,
        requests_per_peer_max: int = 4_096,
        peers_max: int = 256,
        receive_queue_bytes_max: int = 64 << 20,
        tells_dropped: Switch = Switch.OFF,
        on_landed: Callable[[], None] | None = None,
    ) -> None:
        settings = PeersSettings(
            layout_fingerprint=layout_fingerprint,
            rank=rank,
            n_ranks=n_ranks,
            model=model,
            group=group,
            secret=secret,
            curve=curve,
            lease_s=lease_s,
            heartbeat_s=heartbeat_s,
            peer_dead_s=peer_dead_s,
            connect_timeout_s=connect_timeout_s,
            idle_close_s=idle_close_s,
            requests_per_peer_max=requests_per_peer_max,
            peers_max=peers_max,
            receive_queue_bytes_max=receive_queue_bytes_max,
            tells_dropped=tells_dropped,
        )
        _check_page_bytes(memory.page_bytes)
        self._attempts_from = _attempts_from(group)
        self._conversations: dict[Ticket, Conversation] = {}
        self._waker, self._linger_s = Waker(), None
        self._shared = Shared(
            settings=settings,
            context=_context(peers_max),
            memory=memory,
            reports=Reports(on_landed),
            log=QuietLog(_LOG),
            incarnation=wire.new_incarnation(),
            ended=self._forget,
            wake=self._waker.wake,
        )
        self._commands, self._crash = deque[_Command](), None
        self._connections: dict[str, Connection] = {}
        self._turn_s = min(0.1, min(heartbeat_s, connect_timeout_s, peer_dead_s) / 4)
        self._pauses = Pauses(max(1.0, self._turn_s * 4))
        self._thread = _started(self._live)

    # -- the port; called on the tick's thread ---------------------------------------------------

    def send_hold(
        self, ticket: Ticket, rid: Rid, attempt: Attempt, peer: str, prompt: Prompt
    ) -> None:
        if ticket in self._conversations:
            raise ValueError(f"ticket {ticket} has been used already")
        on_wire = Attempt(self._attempts_from + attempt)
        conversation = Conversation(ticket, rid, on_wire, peer, prompt)
        fault = wire.rid_fault(rid) or wire.address_fault(peer) or _prompt_fault(prompt)
        if fault is not None:
            self._shared.reports.add(
                PeerFailed(ticket, PeerCause.REFUSED, f"prefill node {wire.tidy(peer)}: {fault}")
            )
            self._shared.reports.add(PeerLetGo(ticket))
            return
        self._conversations[ticket] = conversation
        self._command(_Hold(conversation))

    def send_want(
        self, ticket: Ticket, start: int, device_pages: Sequence[int], promise: int
    ) -> None:
        conversation = self._conversations.get(ticket)
        if conversation is None or conversation.revoked:
            return  # it has ended; the reports say so
        places = tuple(device_pages)
        positions = range(start, start + len(places))
        n_pages = conversation.prompt.n_pages
        if not 0 <= start <= start + len(places) <= n_pages or not 0 <= promise <= n_pages:
            raise ValueError(
                f"pages [{start}, {start + len(places)}) with promise {promise} of a prompt that "
                f"has {n_pages} pages"
            )
        if not conversation.asked_positions.isdisjoint(positions):
            raise ValueError(f"some of the pages {positions} have been asked for already")
        if any(not 0 <= place < self._shared.memory.n_pages for place in places):
            raise ValueError(f"a place outside of the {self._shared.memory.n_pages} device pages")
        conversation.asked_positions.update(positions)
        self._command(_Want(conversation, Wanted(start, len(places), promise), places))

    def send_committed(self, ticket: Ticket) -> None:
        conversation = self._conversations.get(ticket)
        if conversation is not None and not conversation.revoked:
            conversation.revoked = True
            self._command(_Commit(conversation))

    def send_aborted(self, ticket: Ticket) -> None:
        conversation = self._conversations.get(ticket)
        if conversation is not None and not conversation.revoked:
            conversation.revoked = True
            self._command(_Abort(conversation))

    def close_peer(self, ticket: Ticket) -> None:
        conversation = self._conversations.get(ticket)
        if conversation is not None:
            self._command(_ClosePeer(conversation.address))

    def landed(self) -> list[Landed]:
        if self._crash is not None:
            raise RuntimeError("the thread of the peers' sockets has stopped") from self._crash
        return self._shared.reports.taken()

    def close(self, deadline_s: float) -> bool:
        """End all connections. False: the thread still runs, and may still write a page."""
        if self._linger_s is None:
            self._linger_s = min(LINGER_S_MAX, deadline_s / 2)
        self._waker.wake()
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    @property
    def n_messages_refused(self) -> int:
        """Messages that did not fit the protocol."""
        return self._shared.log.n_events

    def _command(self, command: _Command) -> None:
        if self._linger_s is not None:
            raise RuntimeError("the peers are closed")
        self._commands.append(command)
        self._waker.wake()

    # -- the sockets' thread ---------------------------------------------------------------------

    def _forget(self, ticket: Ticket) -> None:
        self._conversations.pop(ticket, None)

    def _live(self) -> None:
        try:
            while self._linger_s is None:
                self._turn()
            self._obey(time.monotonic())
            for connection in self._connections.values():
                connection.leave(int(self._linger_s * 1_000))
        except BaseException as error:  # noqa: BLE001 - raised again by landed()
            _LOG.exception("the thread of the peers' sockets has stopped")
            self._crash = error
            for connection in self._connections.values():
                connection.abandon()
            self._shared.reports.announce()
        finally:
            self._shared.context.term()
            self._waker.close()

    def _turn(self) -> None:
        self._wait()
        now = time.monotonic()
        slept_s = self._pauses.slept_s(now)
        for connection in self._connections.values():
            connection.stood_still(slept_s)
        self._waker.rest()
        self._obey(now)
        for connection in tuple(self._connections.values()):
            has_more = connection.read(now)
            connection.flush()
            if has_more:
                self._waker.wake()
            else:
                # What came before the end of a connection is heard before the end itself.
                connection.watch(now)
            if not connection.is_closed:
                connection.on_time(now)
            if connection.is_closed:
                self._bury(connection)

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.fileno(), zmq.POLLIN)
        for connection in self._connections.values():
            if connection.socket is not None:
                said = zmq.POLLOUT if connection.has_unsaid else 0
                poller.register(connection.socket, zmq.POLLIN | said)
            if connection.monitor is not None:
                poller.register(connection.monitor, zmq.POLLIN)
        poller.poll(max(1, int(self._turn_s * 1_000)))

    def _obey(self, now: float) -> None:
        for _ in range(len(self._commands)):
            command = self._commands.popleft()
            match command:
                case _Hold(conversation=conversation):
                    self._hold(conversation, now)
                case _Want(conversation=conversation):
                    conversation.want(command.wanted, command.device_pages)
                    if (connection := self._connection_of(conversation)) is not None:
                        connection.want(conversation)
                case _Commit(conversation=conversation):
                    if (connection := self._connection_of(conversation)) is not None:
                        connection.committed(conversation)
                case _Abort(conversation=conversation):
                    if (connection := self._connection_of(conversation)) is not None:
                        connection.aborted(conversation)
                case _ClosePeer(address=address):
                    if (open_one := self._connections.get(address)) is not None:
                        open_one.shut(PeerCause.LOST, "its connection was closed by this rank")
                        self._bury(open_one)

    def _connection_of(self, conversation: Conversation) -> Connection | None:
        """The connection that this conversation is held on; None: the conversation has ended."""
        connection = self._connections.get(conversation.address)
        key = (conversation.rid, conversation.attempt)
        if connection is None or connection.conversations.get(key) is not conversation:
            return None
        return connection

    def _hold(self, conversation: Conversation, now: float) -> None:
        connection = self._connections.get(conversation.address)
        if connection is None:
            connection = Connection(conversation.address, self._shared, now)
            if len(self._connections) >= self._shared.settings.peers_max:
                limit = self._shared.settings.peers_max
                connection.refuse(conversation, f"{limit} other nodes are connected (peers_max)")
                return
            self._connections[conversation.address] = connection
            connection.hold(conversation, now)
            connection.open(now)
        else:
            connection.hold(conversation, now)
        if connection.is_closed:
            self._bury(connection)

    def _bury(self, connection: Connection) -> None:
        if self._connections.get(connection.address) is connection:
            del self._connections[connection.address]


def _started(live: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=live, name="kvlift-peers", daemon=True)
    thread.start()
    return thread


def _context(peers_max: int) -> Context:
    """One that has room for all connections: each takes three sockets, with its monitor."""
    context = zmq.Context()
    context.max_sockets = min(SOCKETS_MAX, 3 * peers_max + 64)
    return context


def _attempts_from(group: str) -> int:
    """Where this worker's attempts begin on the wire, the same on all its ranks: every worker
    counts from 1, and two may be given one request id."""
    drawn = int.from_bytes(hashlib.sha256(group.encode()).digest()[:5], "little")
    return drawn << 22 if group else 0


def _check_page_bytes(page_bytes: int) -> None:
    if not 1 <= page_bytes <= wire.PAGE_BYTES_MAX:
        raise ValueError(f"pages of {page_bytes} bytes do not fit the wire")


def _prompt_fault(prompt: Prompt) -> str | None:
    if len(prompt.tokens) > wire.TOKENS_BYTES_MAX:
        return f"a prompt of {prompt.n_tokens} tokens is longer than the wire carries"
    if prompt.n_pages > wire.N_PAGES_MAX or not 1 <= prompt.page_tokens <= wire.PAGE_TOKENS_MAX:
        return f"{prompt.n_pages} pages of {prompt.page_tokens} tokens do not fit the wire"
    return None
