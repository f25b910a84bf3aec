"""Who may speak on the wire: a shared secret (HMAC challenge and response), or CURVE keys.

A shared secret proves both ends at the start of a connection; it does not hide or seal what is
sent later, so use it inside a network you trust. CURVE (CurveZMQ) authenticates and encrypts every
byte; the prefill node lists the public keys of the ranks that it serves. Both may be combined.
No secret is ever part of a repr, a log line or a message.
"""

import hashlib
import hmac
import ipaddress
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

import zmq
import zmq.utils.z85
from attrs import field, frozen

from kvlift.effects.wire import Challenge, Hello, encoded

SECRET_BYTES_MIN: Final = 16
SECRET_BYTES_MAX: Final = 1_024
CURVE_KEY_CHARS: Final = 40

ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"


@frozen(repr=False)
class SharedSecret:
    """At least 16 bytes that only the decode ranks and the prefill nodes know."""

    _value: bytes = field()

    @_value.validator
    def _is_long_enough(self, _attribute: object, value: bytes) -> None:
        if not SECRET_BYTES_MIN <= len(value) <= SECRET_BYTES_MAX:
            raise ValueError(
                f"a shared secret has {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes, "
                f"this has {len(value)}; make one with `openssl rand -hex 32`"
            )

    def __repr__(self) -> str:
        return "SharedSecret(hidden)"

    @classmethod
    def from_file(cls, path: Path) -> "SharedSecret":
        """The file's content without blanks around it. Refuses a file that others can read."""
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ValueError(f"{path} can be read by others; run `chmod 600 {path}`")
        return cls(path.read_bytes().strip())

    def proof(self, role: Literal["decode", "prefill"], hello: Hello, theirs: Challenge) -> bytes:
        """32 bytes that bind both nonces, both incarnations and everything said in `hello`."""
        said = hashlib.sha256(encoded(hello)).digest()
        answered = theirs.nonce + encoded(theirs.incarnation)
        message = b"kvlift wire 1\0" + role.encode() + b"\0" + said + answered
        return hmac.new(self._value, message, hashlib.sha256).digest()


def expected_proof(
    secret: SharedSecret | None,
    role: Literal["decode", "prefill"],
    hello: Hello,
    challenge: Challenge,
) -> bytes:
    """What `role` must send; empty where no secret is shared."""
    return b"" if secret is None else secret.proof(role, hello, challenge)


def proof_holds(expected: bytes, given: bytes) -> bool:
    """Compared in constant time."""
    return hmac.compare_digest(expected, given)


def _curve_key(_instance: object, attribute: object, value: bytes) -> None:
    if len(value) != CURVE_KEY_CHARS:
        name = getattr(attribute, "name", "key")
        raise ValueError(f"CURVE key {name!r} has {CURVE_KEY_CHARS} characters (Z85)")


def _keys(keys: Iterable[bytes]) -> frozenset[bytes]:
    return frozenset(keys)


@frozen
class CurveServer:
    """The prefill node's key pair and the public keys of the ranks that it serves (all Z85)."""

    public: bytes = field(validator=_curve_key)
    secret: bytes = field(validator=_curve_key, repr=False)
    clients: frozenset[bytes] = field(converter=_keys)

    @clients.validator
    def _names_somebody(self, _attribute: object, value: frozenset[bytes]) -> None:
        if not value:
            raise ValueError("CURVE without clients serves nobody; list the ranks' public keys")

    def dress(self, socket: "zmq.Socket[bytes]") -> None:
        socket.curve_server = 1
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret
        socket.zap_domain = b"kvlift"


@frozen
class CurveClient:
    """A decode rank's key pair and the public key of the prefill nodes (all Z85)."""

    public: bytes = field(validator=_curve_key)
    secret: bytes = field(validator=_curve_key, repr=False)
    server: bytes = field(validator=_curve_key)

    def dress(self, socket: "zmq.Socket[bytes]") -> None:
        socket.curve_serverkey = self.server
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


def curve_pair() -> tuple[bytes, bytes]:
    """A new key pair: public, secret."""
    return zmq.curve_keypair()


class Doorkeeper:
    """Answers libzmq's questions (ZAP, rfc.zeromq.org/27) whether a CURVE key may come in.

    Lives in the context of the sockets that it guards, and on their thread.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", clients: Iterable[bytes]) -> None:
        self._clients = frozenset(zmq.utils.z85.decode(key) for key in clients)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ADDRESS)

    def answer(self) -> None:
        """Answer one question, if there is one."""
        try:
            question = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        version, request = (*question, b"", b"")[:2]
        known = (
            len(question) == 7
            and version == b"1.0"
            and question[5] == b"CURVE"
            and question[6] in self._clients
        )
        verdict = (b"200", b"OK") if known else (b"400", b"unknown key")
        self.socket.send_multipart([b"1.0", request, *verdict, b"", b""])

    def close(self) -> None:
        self.socket.close()


def is_loopback(bind: str) -> bool:
    """Whether nobody outside this machine can reach a ZeroMQ address."""
    if bind.startswith(("ipc://", "inproc://")):
        return True
    host = bind.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
