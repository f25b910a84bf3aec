"""One decode rank's connection to one prefill node. Lives on the thread that owns the sockets.

Why this thread is the proof: it alone writes the pages of a connection into device memory, and it
looks the place of every page up in a conversation first. So once it has closed the socket, or has
read the node's last word about a request (a connection is FIFO), nothing is written any more.
"""

import enum
from collections import deque

import zmq
from attrs import define, field
from zmq.utils.monitor import recv_monitor_message

from kvlift.core.ids import Attempt, Rid
from kvlift.core.landed import PagesArrived, PeerCause, PeerFailed, PeerLetGo, TokenArrived
from kvlift.core.policy import Switch
from kvlift.effects import wire
from kvlift.effects.checksum import crc32
from kvlift.effects.peers_conversation import Conversation
from kvlift.effects.peers_names import Lookup, is_named
from kvlift.effects.peers_settings import Shared
from kvlift.effects.wire_io import Socket, frames_of_next, views
from kvlift.effects.wire_security import expected_proof, proof_holds

MESSAGES_A_TURN_MAX = 64
"""After so many messages the other connections, the commands and the timers get their turn."""

RETRY_S = 0.1


class _Phase(enum.Enum):
    GREETING = enum.auto()
    PROVING = enum.auto()
    OPEN = enum.auto()


@define(eq=False)
class Connection:
    """GREETING (from `Hello` on), PROVING, OPEN; and after `is_closed` it is never used again."""

    address: str
    _shared: Shared
    _asked_s: float
    is_closed: bool = field(default=False, init=False)
    conversations: dict[tuple[Rid, Attempt], Conversation] = field(factory=dict, init=False)
    socket: Socket | None = field(default=None, init=False)
    monitor: Socket | None = field(default=None, init=False)
    _phase: _Phase = field(default=_Phase.GREETING, init=False)
    _hello: wire.Hello | None = field(default=None, init=False)
    _theirs: wire.Incarnation | None = field(default=None, init=False)
    _outbox: deque[tuple[wire.Message, bytes]] = field(factory=deque, init=False)
    _heard_s: float = field(default=0.0, init=False)
    _busy_s: float = field(default=0.0, init=False)
    _beat_s: float = field(default=0.0, init=False)
    _beat_every_s: float = field(default=1.0, init=False)
    _retry_s: float | None = field(default=None, init=False)
    _lookup: Lookup | None = field(default=None, init=False)
    _trouble: str = field(default="", init=False)

    # -- what the tick's thread asked for ------------------------------------------------------

    def hold(self, conversation: Conversation, now: float) -> None:
        key = (conversation.rid, conversation.attempt)
        if key in self.conversations:
            reason = f"attempt {conversation.attempt} of this request is already held there"
            self._end(conversation, PeerCause.REFUSED, reason)
            return
        limit = self._shared.settings.requests_per_peer_max
        if len(self.conversations) >= limit:
            reason = f"{limit} requests are open there (requests_per_peer_max)"
            self._end(conversation, PeerCause.REFUSED, reason)
            return
        if self._silent_s(now) is not None:
            # It has never heard of this request: there is nothing to wait for.
            self._end(conversation, PeerCause.LOST, self._silence(now))
            return
        self.conversations[key] = conversation
        self._busy_s = now
        if self._phase is _Phase.OPEN:
            self._tell(conversation)

    def want(self, conversation: Conversation) -> None:
        """The newest want of a conversation is to be told."""
        if conversation.has_failed or conversation.is_aborted:
            return
        if conversation.is_gone:
            self._end(conversation, PeerCause.GONE, "its lease has ended, the pages are freed")
        elif conversation.is_told:
            self._tell_want(conversation, len(conversation.wants) - 1)

    def committed(self, conversation: Conversation) -> None:
        key = (conversation.rid, conversation.attempt)
        if self.conversations.pop(key, None) is None:
            return
        if conversation.is_told:
            self._send(wire.Committed(*key))
        self._shared.ended(conversation.ticket)

    def aborted(self, conversation: Conversation) -> None:
        key = (conversation.rid, conversation.attempt)
        if key not in self.conversations or conversation.is_aborted:
            return
        conversation.is_aborted = True
        if conversation.is_told and not conversation.is_gone:
            self._send(wire.Aborted(*key))
        elif self._shared.settings.tells_dropped is Switch.OFF or self._phase is _Phase.OPEN:
            self._let_go(conversation)

    # -- opening and closing -------------------------------------------------------------------

    def open(self, now: float) -> None:
        self._phase, self._retry_s, self._theirs = _Phase.GREETING, None, None
        self._heard_s = self._busy_s = now
        if is_named(self.address):
            self._lookup = Lookup(self.address, self._shared.wake)
        else:
            self._connect(self.address)

    def _connect(self, address: str) -> None:
        self._hello = self._shared.hello()
        try:
            self.socket = self._shared.dealer(address)
            self.monitor = self.socket.get_monitor_socket()
            self.socket.connect(address)
        except zmq.ZMQError as error:  # no such address, or this process has too many open files
            self.shut(PeerCause.LOST, f"cannot connect: {error}")
            return
        self._send(self._hello)

    def _take_address(self, lookup: Lookup) -> None:
        """The name service has answered, or not yet."""
        if lookup.found or lookup.fault:
            self._lookup = None
        if lookup.fault:
            self.shut(PeerCause.LOST, f"cannot connect: {lookup.fault}")
        elif lookup.found:
            self._connect(lookup.found)

    def shut(self, cause: PeerCause, reason: str) -> None:
        """Close the socket and end every conversation: from now on nothing can be written."""
        self.is_closed = True
        self._drop_socket(linger_ms=0)
        for conversation in tuple(self.conversations.values()):
            self._end(conversation, cause, reason)

    def leave(self, linger_ms: int) -> None:
        """`shut` because the rank itself ends; what was said last may still go out."""
        self.flush()
        self._drop_socket(linger_ms)
        self.shut(PeerCause.LOST, "this rank has closed its connections")

    def abandon(self) -> None:
        """Close the socket and say nothing: the thread has crashed, and the crash is the report."""
        self._drop_socket(linger_ms=0)

    def refuse(self, conversation: Conversation, reason: str) -> None:
        self._end(conversation, PeerCause.REFUSED, reason)

    def _drop_socket(self, linger_ms: int) -> None:
        if self.socket is not None:
            self.socket.disable_monitor()
            self.socket.close(linger=linger_ms)
        if self.monitor is not None:
            self.monitor.close(linger=0)
        self.socket = self.monitor = None
        self._outbox.clear()

    # -- what the node says --------------------------------------------------------------------

    def read(self, now: float) -> bool:
        """Take waiting messages, up to a limit. Whether there may be more."""
        for _ in range(MESSAGES_A_TURN_MAX):
            if self.socket is None:
                return False
            frames = frames_of_next(self.socket, 2)
            if frames is None:
                return False
            try:
                heard = wire.heard_by_decode(views(frames), self._shared.memory.page_bytes)
            except wire.BadMessageError as error:
                self._shared.log.warn(f"{self.address} sent {error}")
                self.shut(PeerCause.LOST, f"it sent a message outside of the protocol: {error}")
                return False
            self._heard_s = now
            if self._phase is _Phase.OPEN:
                self._hear(heard, now)
            else:
                self._greet(heard.message, now)
        return True

    def _greet(self, message: wire.Message, now: float) -> None:
        match message:
            case wire.Challenge() if self._phase is _Phase.GREETING and self._hello is not None:
                secret = self._shared.settings.secret
                expected = expected_proof(secret, "prefill", self._hello, message)
                if secret is not None and not proof_holds(expected, message.proof):
                    self.shut(PeerCause.REFUSED, "it does not know the shared secret")
                    return
                self._theirs = message.incarnation
                self._phase = _Phase.PROVING
                self._send(wire.Proof(expected_proof(secret, "decode", self._hello, message)))
            case wire.Welcome() if self._phase is _Phase.PROVING:
                self._phase = _Phase.OPEN
                self._beat_every_s = min(self._shared.settings.heartbeat_s, message.lease_s / 4)
                self._beat_s = now + self._beat_every_s
                for conversation in tuple(self.conversations.values()):
                    self._tell(conversation)
                    if conversation.is_aborted:
                        self._send(wire.Aborted(conversation.rid, conversation.attempt))
            case wire.Refused():
                self._refused(message)
            case _:
                return  # old news: nothing of an earlier life is believed before the welcome

    def _refused(self, message: wire.Refused) -> None:
        self.shut(wire.REFUSED_CAUSE[message.cause], f"refused: {wire.tidy(message.reason)}")

    def _hear(self, heard: wire.Heard, now: float) -> None:
        match heard.message:
            case wire.Alive(incarnation=incarnation):
                if incarnation != self._theirs:
                    self.shut(PeerCause.LOST, "it has restarted and has lost its pages")
            case wire.Refused() as refused:
                self._refused(refused)
            case wire.Page() as page:
                self._busy_s = now
                self._page(page, heard.payload)
            case wire.FirstToken() as first:
                self._token(first)
            case wire.AbortedAck(rid=rid, attempt=attempt):
                conversation = self.conversations.get((rid, attempt))
                if conversation is not None and conversation.is_aborted:
                    self._let_go(conversation)
            case wire.Rejected(rid=rid, attempt=attempt, reason=reason):
                conversation = self.conversations.get((rid, attempt))
                if conversation is not None:
                    self._end(conversation, PeerCause.REFUSED, f"rejected: {wire.tidy(reason)}")
            case wire.Gone(rid=rid, attempt=attempt):
                self._gone(rid, attempt)
            case _:
                return  # a second welcome: harmless

    def _page(self, page: wire.Page, payload: memoryview) -> None:
        conversation = self.conversations.get((page.rid, page.attempt))
        if conversation is None:
            return
        device_page = conversation.place_of(page.position)
        if device_page is None:
            return
        if crc32(payload) != page.crc32:
            self._fail(conversation, PeerCause.LOST, f"page {page.position} was damaged")
            return
        self._shared.memory.write_page(device_page, payload)
        if conversation.written(page.position):
            self._shared.reports.add(PagesArrived(conversation.ticket, conversation.n_arrived))

    def _token(self, first: wire.FirstToken) -> None:
        conversation = self.conversations.get((first.rid, first.attempt))
        if conversation is None or conversation.has_token or conversation.is_aborted:
            return
        if conversation.has_failed:
            return
        conversation.has_token = True
        self._shared.reports.add(TokenArrived(conversation.ticket, first.token, first.logprob))

    def _gone(self, rid: Rid, attempt: Attempt) -> None:
        conversation = self.conversations.get((rid, attempt))
        if conversation is None:
            return
        if conversation.n_outstanding or conversation.is_aborted:
            self._end(conversation, PeerCause.GONE, "its lease has ended")
            return
        # All that was asked for is here: it is a failure only if more is asked for later.
        conversation.is_gone = True

    # -- time ----------------------------------------------------------------------------------

    def stood_still(self, slept_s: float) -> None:
        """This rank itself did, for so long: nobody was silent. Before anything else of a turn."""
        self._heard_s += slept_s
        self._asked_s += slept_s

    def on_time(self, now: float) -> None:
        """Heartbeats and timeouts."""
        settings = self._shared.settings
        if self._phase is not _Phase.OPEN:
            if now - self._asked_s > settings.connect_timeout_s:
                waited = f"no answer within {settings.connect_timeout_s:g} s{self._trouble}"
                self.shut(PeerCause.LOST, waited)
                return
            if self._lookup is not None:
                self._take_address(self._lookup)
            elif self._retry_s is not None and now >= self._retry_s:
                self.open(now)
            return
        if now >= self._beat_s:
            self._beat_s = now + self._beat_every_s
            if not self._outbox:
                self._send(wire.Renew())
        if self._silent_s(now) is not None:
            for conversation in tuple(self.conversations.values()):
                self._fail(conversation, PeerCause.LOST, self._silence(now))
        if not self.conversations and now - self._busy_s > settings.idle_close_s:
            self.shut(PeerCause.LOST, "idle")

    def _silent_s(self, now: float) -> float | None:
        silent_s = now - self._heard_s
        is_dead = self._phase is _Phase.OPEN and silent_s > self._shared.settings.peer_dead_s
        return silent_s if is_dead else None

    def _silence(self, now: float) -> str:
        return f"silent for {now - self._heard_s:.1f} s"

    def watch(self, now: float) -> None:
        """Take what the transport reports about the connection itself."""
        while self.monitor is not None:
            try:
                event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            kind = event["event"]
            if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.shut(PeerCause.REFUSED, "it does not accept this rank's CURVE key")
                return
            if kind in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                self._trouble = " (the handshake fails: compare the CURVE settings of both ends)"
            if kind == zmq.EVENT_DISCONNECTED:
                self._disconnected(now)

    def _disconnected(self, now: float) -> None:
        if self._phase is _Phase.OPEN:
            self.shut(PeerCause.LOST, "the connection was closed by the other end")
            return
        self._trouble = self._trouble or " (connections are accepted, but closed at once)"
        self._drop_socket(linger_ms=0)
        self._retry_s = now + RETRY_S

    # -- saying --------------------------------------------------------------------------------

    @property
    def has_unsaid(self) -> bool:
        return bool(self._outbox)

    def flush(self) -> None:
        """Send what is waiting, as far as the socket takes it without blocking."""
        while self._outbox and self.socket is not None:
            message, payload = self._outbox[0]
            more = zmq.SNDMORE if isinstance(message, wire.Hold) else 0
            try:
                self.socket.send(wire.encoded(message), zmq.NOBLOCK | more)
            except zmq.Again:
                return
            if more:
                self.socket.send(payload)
            self._outbox.popleft()

    def _send(self, message: wire.Message, payload: bytes = b"") -> None:
        self._outbox.append((message, payload))
        self.flush()

    def _tell(self, conversation: Conversation) -> None:
        conversation.is_told = True
        prompt = conversation.prompt
        key = (conversation.rid, conversation.attempt)
        self._send(wire.Hold(*key, prompt.namespace, prompt.page_tokens), prompt.tokens)
        for index in range(len(conversation.wants)):
            self._tell_want(conversation, index)

    def _tell_want(self, conversation: Conversation, index: int) -> None:
        wanted = conversation.wants[index]
        start, n_pages, promise = wanted.start, wanted.n_pages, wanted.promise
        key = (conversation.rid, conversation.attempt)
        self._send(wire.Want(*key, start=start, n_pages=n_pages, promise=promise))

    # -- endings -------------------------------------------------------------------------------

    def _fail(self, conversation: Conversation, cause: PeerCause, reason: str) -> None:
        """Report a failure, once. From here on no page of this conversation is written."""
        if conversation.has_failed or conversation.is_aborted:
            return
        conversation.has_failed = True
        said = f"prefill node {self.address}: {reason}"
        self._shared.reports.add(PeerFailed(conversation.ticket, cause, said))

    def _let_go(self, conversation: Conversation) -> None:
        key = (conversation.rid, conversation.attempt)
        if self.conversations.get(key) is conversation:
            del self.conversations[key]
        self._shared.reports.add(PeerLetGo(conversation.ticket))
        self._shared.ended(conversation.ticket)

    def _end(self, conversation: Conversation, cause: PeerCause, reason: str) -> None:
        self._fail(conversation, cause, reason)
        self._let_go(conversation)
