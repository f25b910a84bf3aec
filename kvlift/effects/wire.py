"""The language between decode ranks and prefill nodes: messages, their limits, their framing.

A message is one ZeroMQ multipart message: a header frame (MessagePack of one tagged struct) and,
for `Hold` and `Page` only, a payload frame that is never copied into the header. Nothing that
comes from the other end is trusted: every field has a bound, unknown fields are refused, and
whatever does not fit raises `BadMessageError`, which the ends turn into a dropped message.

The order of a conversation (a connection is FIFO, which several proofs rely on):

    decode rank                       prefill node
    Hello                       ->
                                <-    Challenge
    Proof                       ->
                                <-    Welcome | Refused
    Hold, Want, Want ...        ->
                                <-    Page ..., FirstToken | Rejected | Gone
    Committed | Aborted         ->
                                <-    AbortedAck
    Renew (every heartbeat)     <->   Alive (every heartbeat)
"""

import secrets
import time
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

import msgspec
from attrs import frozen

from kvlift.core.ids import Attempt, Rid
from kvlift.core.keys import KEY_BYTES, TOKEN_BYTES
from kvlift.core.landed import PeerCause

PROTOCOL_VERSION: Final = 1

HEADER_BYTES_MAX: Final = 16_384
"""Bytes of a header frame. The longest is a `Refused` full of 4-byte letters."""

SEAL_BYTES_MAX: Final = 64
"""What CURVE adds to each frame (33 bytes); libzmq counts it in its own limit of a frame."""

RID_CHARS_MAX: Final = 256
NAME_CHARS_MAX: Final = 512
REASON_CHARS_MAX: Final = 2_048
N_PAGES_MAX: Final = 1 << 20
N_RANKS_MAX: Final = 4_096
PAGE_TOKENS_MAX: Final = 1 << 16
PAGE_BYTES_MAX: Final = 1 << 30
TOKENS_BYTES_MAX: Final = 16 << 20
"""Bytes of the tokens of one prompt: 4 Mi tokens."""

ADDRESS_CHARS_MAX: Final = 256

_RidText: TypeAlias = Annotated[Rid, msgspec.Meta(min_length=1, max_length=RID_CHARS_MAX)]
_AttemptNumber: TypeAlias = Annotated[Attempt, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
_Reason: TypeAlias = Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)]
_NPages: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=N_PAGES_MAX)]
_Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=N_RANKS_MAX)]
_NRanks: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=N_RANKS_MAX)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
_Nonce: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Digest: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_ProofBytes: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=32)]
_Word: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Unsigned32: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Token: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: a MessagePack array whose first element is the tag."""


class Incarnation(_Message, frozen=True):
    """One life of one end: a random number and the time of its start. Equal: the same life."""

    number: _Word
    started_unix_s: _Word


def new_incarnation() -> Incarnation:
    return Incarnation(number=secrets.randbits(63), started_unix_s=int(time.time()))


class Hello(_Message, frozen=True, tag="hello"):
    """The decode rank's first words. `group` names its decode worker; empty: it has no name."""

    protocol: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    layout: _Name
    model: _Name
    group: _Name
    rank: _Rank
    n_ranks: _NRanks
    page_bytes: Annotated[int, msgspec.Meta(ge=1, le=PAGE_BYTES_MAX)]
    lease_s: _Seconds
    incarnation: Incarnation
    nonce: _Nonce


class Challenge(_Message, frozen=True, tag="challenge"):
    """The node's answer to `Hello`, with its own proof (empty where no secret is shared)."""

    incarnation: Incarnation
    nonce: _Nonce
    proof: _ProofBytes


class Proof(_Message, frozen=True, tag="proof"):
    proof: _ProofBytes


class Welcome(_Message, frozen=True, tag="welcome"):
    """The rank may speak. `lease_s` is what the node grants: never more than was asked for."""

    lease_s: _Seconds


class Refused(_Message, frozen=True, tag="refused"):
    """The connection is not served. `session`: the node doesn't know it (any more)."""

    cause: Literal["auth", "mismatch", "limit", "session"]
    reason: _Reason


class Hold(_Message, frozen=True, tag="hold"):
    """A request exists: keep its pages. Payload: its tokens, little-endian int32."""

    rid: _RidText
    attempt: _AttemptNumber
    namespace: _Digest
    page_tokens: Annotated[int, msgspec.Meta(ge=1, le=PAGE_TOKENS_MAX)]


class Want(_Message, frozen=True, tag="want"):
    """Send the pages [start, start + n_pages), in order, after those asked for before."""

    rid: _RidText
    attempt: _AttemptNumber
    start: _NPages
    n_pages: _NPages
    promise: _NPages


class Page(_Message, frozen=True, tag="page"):
    """Payload: the bytes of the page at `position` of the prompt, this rank's shard."""

    rid: _RidText
    attempt: _AttemptNumber
    position: _NPages
    crc32: _Unsigned32


class FirstToken(_Message, frozen=True, tag="token"):
    rid: _RidText
    attempt: _AttemptNumber
    token: _Token
    logprob: float


class Committed(_Message, frozen=True, tag="committed"):
    rid: _RidText
    attempt: _AttemptNumber


class Aborted(_Message, frozen=True, tag="aborted"):
    rid: _RidText
    attempt: _AttemptNumber


class AbortedAck(_Message, frozen=True, tag="aborted_ack"):
    """No page of this request comes after this message."""

    rid: _RidText
    attempt: _AttemptNumber


class Rejected(_Message, frozen=True, tag="rejected"):
    """The node will not serve this request; no page of it comes after this message."""

    rid: _RidText
    attempt: _AttemptNumber
    reason: _Reason


class Gone(_Message, frozen=True, tag="gone"):
    """The lease has ended and the pages are freed; no page comes after this message."""

    rid: _RidText
    attempt: _AttemptNumber


class Renew(_Message, frozen=True, tag="renew"):
    """The decode rank lives: renews the lease of all its requests on this connection."""


class Alive(_Message, frozen=True, tag="alive"):
    """The prefill node lives, and it is still this one."""

    incarnation: Incarnation


ToPrefill: TypeAlias = Hello | Proof | Hold | Want | Committed | Aborted | Renew
ToDecode: TypeAlias = (
    Challenge | Welcome | Refused | Page | FirstToken | AbortedAck | Rejected | Gone | Alive
)
Message: TypeAlias = ToPrefill | ToDecode

_ENCODER: Final = msgspec.msgpack.Encoder()
_TO_PREFILL: Final = msgspec.msgpack.Decoder(ToPrefill)
_TO_DECODE: Final = msgspec.msgpack.Decoder(ToDecode)

REFUSED_CAUSE: Final = {
    "auth": PeerCause.REFUSED,
    "mismatch": PeerCause.MISMATCH,
    "limit": PeerCause.REFUSED,
    "session": PeerCause.LOST,
}


class BadMessageError(ValueError):
    """A message that this protocol does not know. Its text never shows the message's content."""


@frozen
class Heard:
    """One message and its payload (empty for messages without one; a view, not a copy)."""

    message: Message
    payload: memoryview


def encoded(message: Message | Incarnation) -> bytes:
    """The header frame of a message; equal messages give equal bytes."""
    return _ENCODER.encode(message)


_T = TypeVar("_T")


def _header(decoder: "msgspec.msgpack.Decoder[_T]", frame: memoryview) -> _T:
    if frame.nbytes > HEADER_BYTES_MAX:
        raise BadMessageError(f"a header of {frame.nbytes} bytes, {HEADER_BYTES_MAX} are legal")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadMessageError(f"a header that cannot be read ({type(error).__name__})") from None


def _payload(message: Message, frames: list[memoryview]) -> memoryview:
    carries = isinstance(message, Hold | Page)
    if len(frames) != (2 if carries else 1):
        raise BadMessageError(f"{type(message).__name__} with {len(frames)} frames")
    return frames[1] if carries else memoryview(b"")


def heard_by_prefill(frames: list[memoryview], tokens_bytes_max: int) -> Heard:
    """Parse what a decode rank sent (without the routing frame). Raises `BadMessageError`."""
    if not frames:
        raise BadMessageError("no frame")
    message = _header(_TO_PREFILL, frames[0])
    payload = _payload(message, frames)
    if payload.nbytes > tokens_bytes_max or payload.nbytes % TOKEN_BYTES:
        raise BadMessageError(f"tokens of {payload.nbytes} bytes, {tokens_bytes_max} are legal")
    return Heard(message, payload)


def heard_by_decode(frames: list[memoryview], page_bytes: int) -> Heard:
    """Parse what a prefill node sent. Raises `BadMessageError`."""
    if not frames:
        raise BadMessageError("no frame")
    message = _header(_TO_DECODE, frames[0])
    payload = _payload(message, frames)
    if isinstance(message, Page) and payload.nbytes != page_bytes:
        raise BadMessageError(f"a page of {payload.nbytes} bytes where a page has {page_bytes}")
    return Heard(message, payload)


def tidy(text: str) -> str:
    """A reason from the other end, as it may be shown: bounded, on one line, printable."""
    shown = text[:REASON_CHARS_MAX]
    return "".join(char if char.isprintable() else "?" for char in shown)


def bounded_reason(text: str) -> str:
    """A reason as it may be sent: short enough for the wire, and encodable."""
    return tidy(text).encode("utf-8", "replace").decode()


def rid_fault(rid: str) -> str | None:
    """Why this request id cannot travel; None where it can."""
    if not 1 <= len(rid) <= RID_CHARS_MAX:
        return f"a request id has 1 to {RID_CHARS_MAX} characters, this has {len(rid)}"
    try:
        rid.encode()
    except UnicodeEncodeError:
        return "the request id is not valid Unicode"
    return None


def address_fault(address: str) -> str | None:
    """Why this is no address of a peer; None where it is one."""
    if len(address) > ADDRESS_CHARS_MAX:
        return f"a peer's address has at most {ADDRESS_CHARS_MAX} characters"
    if not address.startswith(("tcp://", "ipc://")) or not address.isprintable():
        return "name the peer as tcp://host:port or ipc://path"
    return None
