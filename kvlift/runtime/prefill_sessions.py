"""Connections of decode ranks at a prefill node: greeting, proof, bounded sending.

Lives on the thread that owns the ROUTER socket. A rank that has not proved itself gets a challenge
or a refusal, and nothing else.
"""

import secrets
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import zmq
from attrs import define, field, frozen
from attrs.validators import ge, gt, le

from kvlift.effects import wire
from kvlift.effects.wire_io import Socket
from kvlift.effects.wire_security import SharedSecret, expected_proof, proof_holds

if TYPE_CHECKING:
    from kvlift.runtime.prefill_requests import Request

OUTBOX_MAX = 16_384
"""Control messages that may wait for one rank; one that lets more pile up is lost."""

GREETING_S_MAX = 10.0


@define(eq=False)
class Session:
    """One proved connection of one decode rank."""

    identity: bytes
    hello: wire.Hello
    lease_s: float
    renewed_s: float
    is_lost: bool = False
    outbox: deque[wire.ToDecode] = field(factory=deque)
    line: "deque[Request]" = field(factory=deque)
    """Requests that have a page to send to this rank; each gets one page in turn."""

    requests: "OrderedDict[int, Request]" = field(factory=OrderedDict)
    """Requests whose side of this rank is open, by the identity of the object."""

    def has_ended(self, now: float) -> bool:
        return now - self.renewed_s > self.lease_s


def follows(new: wire.Hello, old: wire.Hello) -> bool:
    """Whether `new` is the same rank of the same worker again, so that `old` is over."""
    if (new.group, new.rank) != (old.group, old.rank):
        return False
    return new.incarnation == old.incarnation or bool(new.group)


@frozen(kw_only=True)
class Terms:
    """What a node demands of a decode rank."""

    layout_fingerprint: str
    model: str
    secret: SharedSecret | None
    lease_s: float = field(validator=[gt(0), le(86_400)])
    heartbeat_s: float = field(validator=gt(0))
    n_ranks_max: int = field(validator=[ge(1), le(wire.N_RANKS_MAX)])
    sessions_max: int = field(validator=ge(1))
    incarnation: wire.Incarnation


@frozen
class _Greeting:
    hello: wire.Hello
    challenge: wire.Challenge
    until_s: float


@define(eq=False)
class Greeter:
    """Challenges and proofs of connections that are not sessions yet, at most `sessions_max`."""

    _terms: Terms
    _greetings: OrderedDict[bytes, _Greeting] = field(factory=OrderedDict, init=False)

    def challenge(self, identity: bytes, hello: wire.Hello, now: float) -> wire.Challenge:
        terms = self._terms
        bare = wire.Challenge(
            incarnation=terms.incarnation, nonce=secrets.token_bytes(32), proof=b""
        )
        challenge = wire.Challenge(
            incarnation=bare.incarnation,
            nonce=bare.nonce,
            proof=expected_proof(terms.secret, "prefill", hello, bare),
        )
        self._greetings.pop(identity, None)
        self._greetings[identity] = _Greeting(hello, challenge, now + GREETING_S_MAX)
        while len(self._greetings) > terms.sessions_max:
            self._greetings.popitem(last=False)
        return challenge

    def proved(
        self, identity: bytes, proof: wire.Proof, sessions: Iterable[Session], now: float
    ) -> Session | wire.Refused:
        """The new session, or why there is none. Each challenge can be answered once."""
        greeting = self._greetings.pop(identity, None)
        terms = self._terms
        if greeting is None or now > greeting.until_s:
            return wire.Refused("session", "say hello first")
        hello = greeting.hello
        expected = expected_proof(terms.secret, "decode", hello, greeting.challenge)
        if not proof_holds(expected, proof.proof):
            if terms.secret is None:
                return wire.Refused("auth", "this node has no shared secret, the rank has one")
            return wire.Refused("auth", "the rank does not know the shared secret")
        n_others = sum(not follows(hello, session.hello) for session in sessions)
        refused = self._mismatch(hello) or self._limit(hello, n_others)
        if refused is not None:
            return refused
        return Session(identity, hello, min(terms.lease_s, hello.lease_s), now)

    def _mismatch(self, hello: wire.Hello) -> wire.Refused | None:
        terms = self._terms
        for what, ours, theirs in (
            ("wire protocol", str(wire.PROTOCOL_VERSION), str(hello.protocol)),
            ("KV layout", terms.layout_fingerprint, hello.layout),
            ("model", terms.model, hello.model),
        ):
            if ours != theirs:
                said = f"{what} differs: prefill has {ours!r}, decode has {theirs!r}"
                return wire.Refused("mismatch", wire.bounded_reason(said))
        if hello.rank >= hello.n_ranks:
            return wire.Refused("mismatch", f"rank {hello.rank} of {hello.n_ranks} ranks")
        return None

    def _limit(self, hello: wire.Hello, n_sessions: int) -> wire.Refused | None:
        terms = self._terms
        if hello.n_ranks > terms.n_ranks_max:
            said = f"{hello.n_ranks} decode ranks, at most {terms.n_ranks_max} (n_ranks_max)"
            return wire.Refused("limit", said)
        if n_sessions >= terms.sessions_max:
            return wire.Refused("limit", f"{n_sessions} connections are open (sessions_max)")
        return None


class Lost(Exception):
    """The connection of a session is gone."""


def say(router: Socket, identity: bytes, message: wire.ToDecode) -> None:
    """Send to a connection that is no session: as far as it takes it, without memory."""
    try:
        router.send(identity, zmq.NOBLOCK | zmq.SNDMORE)
    except zmq.ZMQError:
        return  # full or gone
    router.send(wire.encoded(message))


def tell(router: Socket, session: Session, message: wire.ToDecode) -> None:
    """Send to a session, in order; waits in its outbox while the connection is full."""
    if len(session.outbox) >= OUTBOX_MAX:
        raise Lost
    session.outbox.append(message)
    flush(router, session)


def flush(router: Socket, session: Session) -> bool:
    """Send what waits. Whether the outbox is empty now. Raises `Lost`."""
    while session.outbox:
        if not _opened(router, session):
            return False
        router.send(wire.encoded(session.outbox.popleft()))
    return True


def tell_page(
    router: Socket, session: Session, page: wire.Page, data: memoryview
) -> zmq.MessageTracker | None:
    """Send a page without copying it; None: the connection is full.

    The tracker is done when libzmq reads the page's memory no more. Raises `Lost`.
    """
    if not flush(router, session) or not _opened(router, session):
        return None
    router.send(wire.encoded(page), zmq.SNDMORE)
    return router.send(data, copy=False, track=True)


def _opened(router: Socket, session: Session) -> bool:
    """Begin a message to this session: only its first frame can be refused."""
    try:
        router.send(session.identity, zmq.NOBLOCK | zmq.SNDMORE)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            raise Lost from None
        raise
    return True
