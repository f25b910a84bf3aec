"""The prefill half: what an engine that computes prompts embeds, to serve decode ranks.

    with PrefillNode("tcp://127.0.0.1:5555", fingerprint, pages) as node:
        for asked in node.poll():                  # each request once
            ...compute asked.prompt...
            node.page_ready(asked.rid, asked.attempt, n_pages)      # as they are computed
            node.first_token(asked.rid, asked.attempt, token, logprob)
        for ended in node.ended():
            ...the pages of ended.rid may be freed...

All calls are safe on any thread and return at once. One thread of the node's own owns the socket.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

import zmq

from kvlift.core.ids import Attempt, Rid
from kvlift.effects.patience import Pauses
from kvlift.effects.wire import (
    HEADER_BYTES_MAX,
    SEAL_BYTES_MAX,
    TOKENS_BYTES_MAX,
    address_fault,
    new_incarnation,
)
from kvlift.effects.wire_io import Context, Socket, Waker, frames_of_next, views
from kvlift.effects.wire_security import CurveServer, Doorkeeper, SharedSecret, is_loopback
from kvlift.runtime.prefill_desk import Desk
from kvlift.runtime.prefill_ports import Limits, Outlet, PageSource
from kvlift.runtime.prefill_requests import Asked, Ended, How, Key, Request
from kvlift.runtime.prefill_sessions import Terms

_LOG = logging.getLogger(__name__)

MESSAGES_A_TURN_MAX = 256

CLOSE_S = 5.0
"""How long leaving the context manager waits for the node's thread."""


def _warm_up() -> None:
    """pyzmq imports a module and starts a thread with sockets of its own for the first page that
    is sent without copying; then it may be too late, since anybody's connections take open files.
    """
    zmq.Frame(bytes(zmq.COPY_THRESHOLD), track=True, copy=False)


def _refuse_open_bind(bind: str) -> None:
    if not is_loopback(bind):
        raise ValueError(
            f"{bind} can be reached from other machines: give the node a shared secret or "
            "CURVE keys, bind it to 127.0.0.1, or say insecure=True"
        )


class PrefillNode:
    """Serves the KV pages of prompts to decode ranks, under leases.

    - `bind`: `tcp://host:port` (`*` as port: any) or `ipc://path`. An address that other machines
      can reach needs `secret` or `curve`, or `insecure=True`, said explicitly.
    - `layout_fingerprint`, `model`: a decode rank whose words differ is refused (mismatch).
    - `lease_s`: the longest lease granted; a rank renews it with every message and heartbeat.
    - `on_change`: called on the node's thread when `poll` or `ended` has something new.

    A request ends here when every rank has committed or aborted it or its lease has ended, or when
    it is rejected; `ended` tells it after the last page has been read from the engine's memory.
    """

    def __init__(
        self,
        bind: str,
        layout_fingerprint: str,
        pages: PageSource,
        *,
        model: str = "",
        secret: SharedSecret | None = None,
        curve: CurveServer | None = None,
        insecure: bool = False,
        lease_s: float = 30.0,
        heartbeat_s: float = 1.0,
        n_ranks_max: int = 64,
        requests_max: int = 4_096,
        sessions_max: int = 1_024,
        tokens_bytes_max: int = TOKENS_BYTES_MAX,
        tokens_bytes_total_max: int = 1 << 30,
        send_queue_pages_max: int = 32,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        if (fault := address_fault(bind)) is not None:
            raise ValueError(f"{bind!r}: {fault}")
        if secret is None and curve is None and not insecure:
            _refuse_open_bind(bind)
        limits = Limits(
            requests_max=requests_max,
            tokens_bytes_max=tokens_bytes_max,
            tokens_bytes_total_max=tokens_bytes_total_max,
            send_queue_pages_max=send_queue_pages_max,
        )
        terms = Terms(
            layout_fingerprint=layout_fingerprint,
            model=model,
            secret=secret,
            lease_s=lease_s,
            heartbeat_s=heartbeat_s,
            n_ranks_max=n_ranks_max,
            sessions_max=sessions_max,
            incarnation=new_incarnation(),
        )
        self._lock = threading.Lock()
        self._asked: dict[Key, Asked] = {}
        self._ended: list[Ended] = []
        self._n_pages: dict[Key, int] = {}
        self._on_change = on_change
        self._commands: deque[Callable[[Desk], None]] = deque()
        self._is_closing = False
        self._crash: BaseException | None = None
        self._turn_s = min(0.1, heartbeat_s / 4, lease_s / 4)
        self._pauses = Pauses(max(1.0, self._turn_s * 4))
        self._context: Context = zmq.Context()
        self._doorkeeper: Doorkeeper | None = None
        self._router = self._bound(bind, limits, terms, curve)
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        outlet = Outlet(asked=self._note_asked, ended=self._note_ended)
        self._desk = Desk(self._router, terms, limits, pages, outlet)
        self._waker = Waker()
        self._thread = threading.Thread(target=self._live, name="kvlift-prefill", daemon=True)
        self._thread.start()

    def _bound(self, bind: str, limits: Limits, terms: Terms, curve: CurveServer | None) -> Socket:
        _warm_up()
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.router_mandatory = 1
        router.sndhwm = limits.send_queue_pages_max
        router.rcvhwm = 1_000
        router.maxmsgsize = max(HEADER_BYTES_MAX, limits.tokens_bytes_max) + SEAL_BYTES_MAX
        # A connection whose other end does not even answer libzmq is closed after a lease, which
        # also frees the pages that were given to it: nothing can pin them for longer.
        router.heartbeat_ivl = max(1, int(terms.lease_s * 1_000 / 3))
        router.heartbeat_timeout = max(1, int(terms.lease_s * 1_000))
        router.handshake_ivl = 10_000
        router.ipv6 = "[" in bind
        if curve is not None:
            self._doorkeeper = Doorkeeper(self._context, curve.clients)
            curve.dress(router)
        try:
            router.bind(bind)
            if bind.startswith("ipc://"):
                os.chmod(bind.removeprefix("ipc://"), 0o600)
        except (zmq.ZMQError, OSError) as error:
            self._close_sockets(router)
            raise ValueError(f"the prefill node cannot bind {bind}: {error}") from error
        return router

    # -- the engine's calls; any thread ----------------------------------------------------------

    def poll(self) -> list[Asked]:
        """Requests that are held since the last call, each announced once."""
        self._check()
        with self._lock:
            asked = list(self._asked.values())
            self._asked.clear()
        return asked

    def ended(self) -> list[Ended]:
        """Requests that were announced and whose pages nothing reads any more."""
        self._check()
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def page_ready(self, rid: Rid, attempt: Attempt, n_pages: int) -> None:
        """The pages [0, n_pages) are computed. Call it as often as there are more."""
        with self._lock:
            n_pages_max = self._n_pages.get((rid, attempt))
        if n_pages_max is None:
            return  # it has ended
        if not 0 <= n_pages <= n_pages_max:
            raise ValueError(f"{n_pages} pages of a prompt that has {n_pages_max}")
        self._command(lambda desk: desk.page_ready((rid, attempt), n_pages))

    def first_token(self, rid: Rid, attempt: Attempt, token: int, logprob: float) -> None:
        """The token that was sampled after the prompt."""
        if not 0 <= token < 1 << 31:
            raise ValueError(f"{token} is no token id")
        self._command(lambda desk: desk.first_token((rid, attempt), token, float(logprob)))

    def reject(self, rid: Rid, attempt: Attempt, reason: str) -> None:
        """This request is not served; every rank is told why."""
        self._command(lambda desk: desk.reject((rid, attempt), reason))

    def expire(self, rid: Rid, attempt: Attempt) -> None:
        """The engine needs the memory now: end the leases of this request before their time."""
        self._command(lambda desk: desk.expire((rid, attempt)))

    def close(self, deadline_s: float = CLOSE_S) -> bool:
        """Close all connections. True: nothing reads the engine's pages any more."""
        self._is_closing = True
        self._waker.wake()
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.close() and error is None:
            raise RuntimeError(f"the prefill node's thread did not end within {CLOSE_S:g} s")

    @property
    def n_messages_refused(self) -> int:
        """Messages and connections that were dropped or refused."""
        return self._desk.log.n_events

    def _command(self, command: Callable[[Desk], None]) -> None:
        self._check()
        self._commands.append(command)
        self._waker.wake()

    def _check(self) -> None:
        if self._crash is not None:
            raise RuntimeError("the prefill node's thread has stopped") from self._crash

    # -- the node's thread -----------------------------------------------------------------------

    def _note_asked(self, request: Request) -> None:
        asked = Asked(request.rid, request.attempt, request.prompt, request.n_ranks)
        with self._lock:
            self._asked[request.key] = asked
            self._n_pages[request.key] = request.prompt.n_pages
        self._changed()

    def _note_ended(self, request: Request, how: How) -> None:
        with self._lock:
            self._n_pages.pop(request.key, None)
            if self._asked.pop(request.key, None) is None:
                self._ended.append(Ended(request.rid, request.attempt, how))
        self._changed()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()

    def _live(self) -> None:
        try:
            timeout_s = 0.0
            while not self._is_closing:
                timeout_s = self._turn(timeout_s)
        except BaseException as error:  # noqa: BLE001 - raised again by every call of the engine
            _LOG.exception("the prefill node's thread has stopped")
            self._crash = error
            self._changed()
        finally:
            self._close_sockets(self._router)
            self._desk.close()
            self._waker.close()

    def _close_sockets(self, router: Socket) -> None:
        router.close(linger=0)
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        self._context.term()

    def _turn(self, timeout_s: float) -> float:
        """One round. How long the next one may wait for something to happen."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._waker.fileno(), zmq.POLLIN)
        if self._doorkeeper is not None:
            poller.register(self._doorkeeper.socket, zmq.POLLIN)
        poller.poll(int(timeout_s * 1_000))
        now = time.monotonic()
        self._desk.stood_still(self._pauses.slept_s(now))
        self._waker.rest()
        if self._doorkeeper is not None:
            self._doorkeeper.answer()
        has_more = self._read(now)
        for _ in range(len(self._commands)):
            self._commands.popleft()(self._desk)
        self._desk.on_time(now)
        is_blocked, has_pages = self._desk.pump()
        is_sending = self._desk.report_ended()
        if has_more or has_pages:
            return 0.0
        return min(self._turn_s, 0.002) if is_blocked or is_sending else self._turn_s

    def _read(self, now: float) -> bool:
        for _ in range(MESSAGES_A_TURN_MAX):
            frames = frames_of_next(self._router, 3)
            if frames is None:
                return False
            self._desk.hear(views(frames), now)
        return True
