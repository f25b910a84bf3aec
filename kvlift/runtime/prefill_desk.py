"""The prefill half's desk: hears the decode ranks, keeps requests under their leases, sends pages.

Everything here runs on the one thread that owns the ROUTER socket. A page is given to libzmq only
if the connection takes it at once, so a slow rank holds up nobody but itself, and nothing of a
request is queued that an abort could not stop.
"""

import logging
from collections import deque

from attrs import define, field

from kvlift.core.prompt import Prompt
from kvlift.effects import wire
from kvlift.effects.checksum import crc32
from kvlift.effects.wire_io import QuietLog, Socket
from kvlift.runtime.prefill_ports import Limits, Outlet, PageSource
from kvlift.runtime.prefill_requests import How, Key, Request, Side, SideState, StagedPage
from kvlift.runtime.prefill_sessions import (
    Greeter,
    Lost,
    Session,
    Terms,
    flush,
    follows,
    say,
    tell,
    tell_page,
)

_LOG = logging.getLogger(__name__)

PAGES_A_TURN_MAX = 64
"""After so many pages the messages and timers get their turn."""


@define(eq=False)
class Desk:
    _router: Socket
    _terms: Terms
    _limits: Limits
    _pages: PageSource
    _outlet: Outlet
    log: QuietLog = field(factory=lambda: QuietLog(_LOG), init=False)
    sessions: dict[bytes, Session] = field(factory=dict, init=False)
    requests: dict[Key, Request] = field(factory=dict, init=False)
    _greeter: Greeter = field(init=False)
    _over: dict[int, Request] = field(factory=dict, init=False)
    _tokens_bytes: int = field(default=0, init=False)
    _beat_s: float = field(default=0.0, init=False)

    def __attrs_post_init__(self) -> None:
        self._greeter = Greeter(self._terms)

    # -- what the decode ranks say -------------------------------------------------------------

    def hear(self, frames: list[memoryview], now: float) -> None:
        """One multipart message of the ROUTER socket. What does not fit is dropped."""
        identity = bytes(frames[0])
        try:
            heard = wire.heard_by_prefill(frames[1:], self._limits.tokens_bytes_max)
        except wire.BadMessageError as error:
            self.log.warn(f"dropped a message from a decode rank: {error}")
            return
        match heard.message:
            case wire.Hello() as hello:
                say(self._router, identity, self._greeter.challenge(identity, hello, now))
            case wire.Proof() as proof:
                self._admit(identity, proof, now)
            case _:
                session = self.sessions.get(identity)
                if session is None:
                    say(self._router, identity, wire.Refused("session", "this node has restarted"))
                    return
                session.renewed_s = now
                try:
                    self._hear_session(session, heard, now)
                except Lost:
                    self._lose(session)

    def _admit(self, identity: bytes, proof: wire.Proof, now: float) -> None:
        answer = self._greeter.proved(identity, proof, self.sessions.values(), now)
        if isinstance(answer, wire.Refused):
            self.log.warn(f"refused a decode rank: {answer.reason}")
            say(self._router, identity, answer)
            return
        for old in tuple(self.sessions.values()):
            if old.identity == identity or follows(answer.hello, old.hello):
                self._lose(old)
        self.sessions[identity] = answer
        try:
            tell(self._router, answer, wire.Welcome(answer.lease_s))
        except Lost:
            self._lose(answer)

    def _hear_session(self, session: Session, heard: wire.Heard, now: float) -> None:
        match heard.message:
            case wire.Hold() as hold:
                self._hold(session, hold, heard.payload, now)
            case wire.Want() as want:
                self._want(session, want)
            case wire.Committed(rid=rid, attempt=attempt):
                self._close_if_held((rid, attempt), session, SideState.COMMITTED)
            case wire.Aborted(rid=rid, attempt=attempt):
                self._close_if_held((rid, attempt), session, SideState.ABORTED)
                tell(self._router, session, wire.AbortedAck(rid, attempt))
            case _:
                return  # `Renew`: every message renews

    def _hold(self, session: Session, hold: wire.Hold, tokens: memoryview, now: float) -> None:
        request = self.requests.get((hold.rid, hold.attempt))
        if request is None:
            fault = self._no_room(hold, tokens)
        else:
            fault = request.hold_fault(session, hold, tokens)
        if fault is not None:
            reason = wire.bounded_reason(fault)
            tell(self._router, session, wire.Rejected(hold.rid, hold.attempt, reason))
            return
        if request is None:
            request = self._new_request(session, hold, tokens, now)
        side = request.sides[session.hello.rank]
        if side.state is not SideState.ABSENT:
            if side.state in (SideState.LEASE_ENDED, SideState.LOST):
                tell(self._router, session, wire.Gone(hold.rid, hold.attempt))
            return
        side.state, side.session = SideState.OPEN, session
        session.requests[id(request)] = request
        if request.rejected is not None:
            self._close_side(request, side, SideState.REJECTED)
            tell(self._router, session, wire.Rejected(*request.key, request.rejected))
        elif request.first is not None:
            tell(self._router, session, request.first)

    def _no_room(self, hold: wire.Hold, tokens: memoryview) -> str | None:
        limits = self._limits
        if any(one.key == (hold.rid, hold.attempt) for one in self._over.values()):
            return "pages of this request's last attempt of the same number are still being sent"
        if len(self.requests) >= limits.requests_max:
            return f"{limits.requests_max} requests are held here (requests_max)"
        if self._tokens_bytes + tokens.nbytes > limits.tokens_bytes_total_max:
            return "the prompts held here fill tokens_bytes_total_max"
        if tokens.nbytes > hold.page_tokens * wire.N_PAGES_MAX * 4:
            return f"a prompt of more than {wire.N_PAGES_MAX} pages"
        return None

    def _new_request(
        self, session: Session, hold: wire.Hold, tokens: memoryview, now: float
    ) -> Request:
        request = Request(
            rid=hold.rid,
            attempt=hold.attempt,
            prompt=Prompt(hold.namespace, bytes(tokens), hold.page_tokens),
            group=session.hello.group,
            asked_s=now,
            sides=[Side() for _ in range(session.hello.n_ranks)],
        )
        self.requests[request.key] = request
        self._tokens_bytes += tokens.nbytes
        self._outlet.asked(request)
        return request

    def _want(self, session: Session, want: wire.Want) -> None:
        key = (want.rid, want.attempt)
        request = self.requests.get(key)
        side = None if request is None else self._side(request, session)
        if request is None or side is None or side.state is not SideState.OPEN:
            tell(self._router, session, wire.Gone(*key))
            return
        fault = request.want_fault(session.hello.rank, want) or request.agree()
        if fault is not None:
            self._reject(request, fault)
            return
        self._line_up(request)

    def _side(self, request: Request, session: Session) -> Side | None:
        if session.hello.rank >= request.n_ranks:
            return None
        side = request.sides[session.hello.rank]
        return side if side.session is session else None

    def _close_if_held(self, key: Key, session: Session, state: SideState) -> None:
        request = self.requests.get(key)
        side = None if request is None else self._side(request, session)
        if request is not None and side is not None and side.state is SideState.OPEN:
            self._close_side(request, side, state)

    # -- what the engine says ------------------------------------------------------------------

    def page_ready(self, key: Key, n_pages: int) -> None:
        request = self.requests.get(key)
        if request is not None and n_pages > request.n_ready:
            request.n_ready = n_pages
            self._line_up(request)

    def first_token(self, key: Key, token: int, logprob: float) -> None:
        request = self.requests.get(key)
        if request is None or request.first is not None:
            return
        request.first = wire.FirstToken(*key, token=token, logprob=logprob)
        self._tell_sides(request, request.first)

    def reject(self, key: Key, reason: str) -> None:
        request = self.requests.get(key)
        if request is not None:
            self._reject(request, reason)

    def expire(self, key: Key) -> None:
        """End the leases of this request now."""
        request = self.requests.get(key)
        if request is None:
            return
        gone = wire.Gone(*request.key)
        self._tell_sides(request, gone)
        for side in request.sides:
            if side.state in (SideState.OPEN, SideState.ABSENT):
                self._close_side(request, side, SideState.LEASE_ENDED)

    def _reject(self, request: Request, reason: str) -> None:
        if request.rejected is not None:
            return
        request.rejected = wire.bounded_reason(reason)
        _LOG.info("request %s rejected: %s", wire.tidy(request.rid), request.rejected)
        self._tell_sides(request, wire.Rejected(*request.key, request.rejected))
        for side in request.open_sides():
            self._close_side(request, side, SideState.REJECTED)
        self._settle(request)

    def _tell_sides(self, request: Request, message: wire.ToDecode) -> None:
        for side in request.open_sides():
            session = side.session
            if session is None or session.is_lost:
                continue
            try:
                tell(self._router, session, message)
            except Lost:
                self._lose(session)

    # -- sending -------------------------------------------------------------------------------

    def _line_up(self, request: Request) -> None:
        for side in request.sides:
            if side.session is not None and not side.is_queued and request.has_sendable(side):
                side.is_queued = True
                side.session.line.append(request)

    def pump(self) -> tuple[bool, bool]:
        """Send what the connections take. (some connection is full, there is more to send)."""
        is_blocked = False
        n_left = PAGES_A_TURN_MAX
        active = deque(one for one in self.sessions.values() if one.line or one.outbox)
        while active and n_left:
            session = active.popleft()
            n_left -= 1
            try:
                taken = flush(self._router, session) and self._send_next(session)
            except Lost:
                self._lose(session)
                continue
            if not taken:
                is_blocked = True
            elif session.line:
                active.append(session)
        return is_blocked, bool(active)

    def _send_next(self, session: Session) -> bool:
        """Send one page of the first request in line. False: the connection is full."""
        if not session.line:
            return True
        request = session.line[0]
        side = request.sides[session.hello.rank]
        if request.has_sendable(side):
            page = side.staged or self._stage(request, side, session)
            if page is not None:
                tracker = tell_page(self._router, session, page.message, page.data)
                if tracker is None:
                    side.staged = page
                    return False
                request.in_flight.append(tracker)
                side.staged = None
                side.unsent.popleft()
        if session.line and session.line[0] is request:
            session.line.popleft()
        side.is_queued = request.has_sendable(side)
        if side.is_queued:
            session.line.append(request)
        return True

    def _stage(self, request: Request, side: Side, session: Session) -> StagedPage | None:
        position = side.unsent[0]
        rank = session.hello.rank
        try:
            buffer = self._pages.page_bytes_for(request.rid, position, rank, request.n_ranks)
            data = memoryview(buffer).cast("B")
        except Exception:  # noqa: BLE001 - the engine's code: its bug ends one request, loudly
            _LOG.exception("the page source failed for request %s", wire.tidy(request.rid))
            self._reject(request, f"the prefill engine could not give page {position}")
            return None
        if data.nbytes != session.hello.page_bytes:
            said = f"decode pages have {session.hello.page_bytes} bytes, prefill {data.nbytes}"
            self._reject(request, said)
            return None
        message = wire.Page(*request.key, position=position, crc32=crc32(data))
        return StagedPage(message, data)

    # -- time and endings ----------------------------------------------------------------------

    def stood_still(self, slept_s: float) -> None:
        """This node itself did, for so long: no lease ran. Before anything else of a turn."""
        if slept_s:
            for session in self.sessions.values():
                session.renewed_s += slept_s
            for request in self.requests.values():
                request.asked_s += slept_s

    def on_time(self, now: float) -> None:
        """Leases and heartbeats."""
        for session in tuple(self.sessions.values()):
            if session.has_ended(now):
                self._end_lease(session, now)
        if now >= self._beat_s:
            for request in tuple(self.requests.values()):
                if now - request.asked_s > self._terms.lease_s:
                    self._give_up_absent(request)
            self._beat_s = now + self._terms.heartbeat_s
            self._beat()

    def _give_up_absent(self, request: Request) -> None:
        for side in request.sides:
            if side.state is SideState.ABSENT:
                self._close_side(request, side, SideState.LEASE_ENDED)

    def _end_lease(self, session: Session, now: float) -> None:
        try:
            for request in tuple(session.requests.values()):
                self._close_side(request, request.sides[session.hello.rank], SideState.LEASE_ENDED)
                tell(self._router, session, wire.Gone(*request.key))
        except Lost:
            self._lose(session)
        if now - session.renewed_s > 2 * session.lease_s:
            self._lose(session)

    def _beat(self) -> None:
        for session in tuple(self.sessions.values()):
            try:
                if flush(self._router, session):
                    tell(self._router, session, wire.Alive(self._terms.incarnation))
            except Lost:
                self._lose(session)

    def _lose(self, session: Session) -> None:
        session.is_lost = True
        if self.sessions.get(session.identity) is session:
            del self.sessions[session.identity]
        for request in tuple(session.requests.values()):
            self._close_side(request, request.sides[session.hello.rank], SideState.LOST)
        session.outbox.clear()
        session.line.clear()

    def _close_side(self, request: Request, side: Side, state: SideState) -> None:
        side.close(state)
        if side.session is not None:
            side.session.requests.pop(id(request), None)
        self._settle(request)

    def _settle(self, request: Request) -> None:
        is_over = request.is_over()
        if (is_over or request.rejected is not None) and not request.is_reported:
            self._over[id(request)] = request
        if is_over and self.requests.get(request.key) is request:
            del self.requests[request.key]
            self._tokens_bytes -= len(request.prompt.tokens)
        self._report_if_sent(request)

    def _report_if_sent(self, request: Request) -> None:
        if id(request) in self._over and request.is_released():
            del self._over[id(request)]
            request.is_reported = True
            self._outlet.ended(request, request.how())

    def report_ended(self) -> bool:
        """Tell the engine of requests that are over and sent. Whether some are still being sent."""
        for request in tuple(self._over.values()):
            self._report_if_sent(request)
        return bool(self._over)

    def close(self) -> None:
        """The socket is closed and its context ended: nothing reads any page now."""
        live = {id(request): request for request in self.requests.values()} | self._over
        for request in live.values():
            if not request.is_reported:
                self._outlet.ended(request, How.CLOSED)
