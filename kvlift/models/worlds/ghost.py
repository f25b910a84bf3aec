"""What the environment knows and the core does not: one rank's memory, and what still moves in it.

A record of its own of every outstanding copy, read, write and remote write, and of what each page
really holds. It shares no code with the core. A breach is written into `Rank.wrong`.
"""

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Final, TypeAlias

from attrs import define, evolve, field, frozen

from kvlift.core.effect import (
    CancelPersist,
    CancelPrefetch,
    CancelRestore,
    ClosePeer,
    Effect,
    ForgetStorage,
    FreeDevice,
    FreeHost,
    SendAborted,
    SendCommitted,
    SendHold,
    SendWant,
    StartLookup,
    StartMirror,
    StartPersist,
    StartPrefetch,
    StartRestore,
    TakeDevice,
    TakeHost,
)
from kvlift.core.ids import DeviceHandle, HostHandle, Ticket
from kvlift.core.landed import Landed, PeerCause
from kvlift.core.local import Local
from kvlift.core.prompt import Prompt

Tag = bytes
"""What a page must hold: its namespace and all tokens up to its end."""

Aside: TypeAlias = tuple[int, int]
"""Pages of the device, and of the host, that are somebody else's."""

TOUCHED: Final = "no page is freed or reused while something may touch it"
TWICE: Final = "no page is taken twice or freed twice"
CANCELLED: Final = "nothing is cancelled twice"
UNREADY: Final = "a copy starts from good pages"
TOO_MANY: Final = "no more pages are taken than there are"
UNDELIVERED: Final = "a peer is let go when everything has come"
WRONG_CONTENT: Final = "a ready request has the right content at every position"
LYING_INDEX: Final = "the index tells what is there"
DIFFERENT: Final = "all ranks decide the same"
GHOST_CLAIMS: Final = (
    TOUCHED,
    TWICE,
    CANCELLED,
    UNREADY,
    TOO_MANY,
    UNDELIVERED,
    WRONG_CONTENT,
    LYING_INDEX,
    DIFFERENT,
)


def tag_of(prompt: Prompt, position: int) -> Tag:
    """The last page may be partial: then it is all tokens that there are."""
    return prompt.namespace + prompt.tokens[: (position + 1) * prompt.page_bytes()]


class Doing(Enum):
    LOOKUP = "lookup"
    READ = "read"
    RESTORE = "restore"
    MIRROR = "mirror"
    PERSIST = "persist"


@frozen(kw_only=True, cache_hash=True)
class Operation:
    """Work of a port. `n_done`: pages of a read that are complete. `landed`: how many pages were
    good in the end, not told to the core yet. `start`: see `StartRestore`. `is_silent`: whether it
    ends at all is open."""

    ticket: Ticket
    doing: Doing
    host: tuple[HostHandle, ...] = ()
    device: tuple[DeviceHandle, ...] = ()
    tags: tuple[Tag, ...] = ()
    start: int = 0
    n_done: int = 0
    landed: int | None = None
    is_cancelled: bool = False
    is_silent: bool = False

    @property
    def n_pages(self) -> int:
        return max(len(self.host), len(self.device), len(self.tags))


@frozen(kw_only=True, cache_hash=True)
class Talk:
    """A conversation with the prefill node. `tags` and `places` are of all wants, in order; the
    first `n_landed` are written. `told` is what the core has heard so far, as (pages, failure).
    `is_echoing`: its last count will be delivered a second time."""

    ticket: Ticket
    prompt: Prompt
    tags: tuple[Tag, ...] = ()
    places: tuple[DeviceHandle, ...] = ()
    is_asked: bool = False
    n_landed: int = 0
    n_told: int = 0
    has_token: bool = False
    is_token_told: bool = False
    is_aborted: bool = False
    is_closing: bool = False
    failed: PeerCause | None = None
    is_failure_told: bool = False
    has_let_go: bool = False
    is_silent: bool = False
    is_echoing: bool = False
    has_other_token: bool = False


@frozen(cache_hash=True)
class DevicePage:
    page: DeviceHandle
    tag: Tag | None


@frozen(cache_hash=True)
class HostPage:
    page: HostHandle
    tag: Tag | None


@frozen(kw_only=True)
class Rank:
    """`expired`: tickets whose deadline has passed, not heard of yet. `echoes`: reports that will
    be delivered a second time. `stored`: what this rank's storage really has. `aside`: pages of the
    device and of the host that somebody else has here."""

    local: Local
    operations: tuple[Operation, ...] = ()
    talks: tuple[Talk, ...] = ()
    device: tuple[DevicePage, ...] = ()
    host: tuple[HostPage, ...] = ()
    stored: frozenset[Tag] = frozenset()
    expired: tuple[Ticket, ...] = ()
    echoes: tuple[Landed, ...] = ()
    wrong: str = ""
    aside: Aside = (0, 0)


def with_operation(rank: Rank, before: Operation, after: Operation | None) -> Rank:
    """The rank with one operation replaced, or gone."""
    kept = tuple(after if one is before else one for one in rank.operations)
    return evolve(rank, operations=tuple(one for one in kept if one is not None))


def with_talk(rank: Rank, before: Talk, after: Talk | None) -> Rank:
    kept = tuple(after if one is before else one for one in rank.talks)
    return evolve(rank, talks=tuple(one for one in kept if one is not None))


@define
class Bench:
    """A rank's ghost while something happens to it."""

    rank: Rank
    n_device_pages: int
    n_host_pages: int
    device: dict[DeviceHandle, Tag | None] = field(init=False)
    host: dict[HostHandle, Tag | None] = field(init=False)
    operations: list[Operation] = field(init=False)
    talks: list[Talk] = field(init=False)
    stored: set[Tag] = field(init=False)
    wrong: str = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.device = {page.page: page.tag for page in self.rank.device}
        self.host = {page.page: page.tag for page in self.rank.host}
        self.operations = list(self.rank.operations)
        self.talks = list(self.rank.talks)
        self.stored = set(self.rank.stored)
        self.wrong = self.rank.wrong

    def done(self) -> Rank:
        return evolve(
            self.rank,
            operations=tuple(self.operations),
            talks=tuple(self.talks),
            device=tuple(DevicePage(page, tag) for page, tag in self.device.items()),
            host=tuple(HostPage(page, tag) for page, tag in self.host.items()),
            stored=frozenset(self.stored),
            wrong=self.wrong,
        )

    def blame(self, claim: str) -> None:
        self.wrong = self.wrong or claim

    # Who touches what.

    def _device_writers(self) -> Iterator[DeviceHandle]:
        for one in self.operations:
            if one.doing is Doing.RESTORE and one.landed is None:
                yield from one.device
        for talk in self.talks:
            if not talk.has_let_go:
                yield from talk.places[talk.n_landed :]

    def _device_readers(self) -> Iterator[DeviceHandle]:
        for one in self.operations:
            if one.doing in (Doing.MIRROR, Doing.PERSIST) and one.landed is None:
                yield from one.device

    def _host_writers(self) -> Iterator[HostHandle]:
        for one in self.operations:
            if one.doing is Doing.READ and one.landed is None:
                yield from one.host[one.n_done :]
            elif one.doing is Doing.MIRROR and one.landed is None:
                yield from one.host

    def _host_readers(self) -> Iterator[HostHandle]:
        for one in self.operations:
            if one.doing in (Doing.RESTORE, Doing.PERSIST) and one.landed is None:
                yield from one.host

    # Effects.

    def start(self, effects: Iterable[Effect]) -> None:
        """What the core lets start on this rank, in order."""
        for effect in effects:
            self._start(effect)

    def _start(self, effect: Effect) -> None:
        match effect:
            case TakeDevice(pages=pages):
                if any(page in self.device for page in pages):
                    self.blame(TWICE)
                self.device.update(dict.fromkeys(pages))
            case TakeHost(pages=host):
                if any(page in self.host for page in host):
                    self.blame(TWICE)
                self.host.update(dict.fromkeys(host))
            case FreeDevice(pages=pages):
                self._free_device(pages)
            case FreeHost(pages=host):
                self._free_host(host)
            case SendHold() | SendWant() | SendCommitted() | SendAborted() | ClosePeer():
                self._tell_peer(effect)
            case StartRestore() | StartMirror():
                self._start_copy(effect)
            case CancelRestore():
                pass
            case (
                StartLookup()
                | StartPrefetch()
                | CancelPrefetch()
                | StartPersist()
                | CancelPersist()
            ):
                self._tell_store(effect)
            case ForgetStorage():
                self.stored.clear()

    def _free_device(self, pages: tuple[DeviceHandle, ...]) -> None:
        busy = {*self._device_writers(), *self._device_readers()}
        for page in pages:
            if page in busy:
                self.blame(TOUCHED)
            if page not in self.device:
                self.blame(TWICE)
            self.device.pop(page, None)

    def _free_host(self, pages: tuple[HostHandle, ...]) -> None:
        busy = {*self._host_writers(), *self._host_readers()}
        for page in pages:
            if page in busy:
                self.blame(TOUCHED)
            if page not in self.host:
                self.blame(TWICE)
            self.host.pop(page, None)

    def _write_device(self, pages: tuple[DeviceHandle, ...]) -> None:
        busy = {*self._device_writers(), *self._device_readers()}
        for page in pages:
            if page in busy or page not in self.device:
                self.blame(TOUCHED)
            self.device[page] = None

    def _write_host(self, pages: tuple[HostHandle, ...]) -> None:
        busy = {*self._host_writers(), *self._host_readers()}
        for page in pages:
            if page in busy or page not in self.host:
                self.blame(TOUCHED)
            self.host[page] = None

    def _read_device(self, pages: tuple[DeviceHandle, ...]) -> None:
        busy = set(self._device_writers())
        if any(page in busy or self.device.get(page) is None for page in pages):
            self.blame(UNREADY)

    def _read_host(self, pages: tuple[HostHandle, ...]) -> None:
        busy = set(self._host_writers())
        if any(page in busy or self.host.get(page) is None for page in pages):
            self.blame(UNREADY)

    def _start_copy(self, effect: StartRestore | StartMirror) -> None:
        doing, start = Doing.MIRROR, 0
        if isinstance(effect, StartRestore):
            self._read_host(effect.host)
            self._write_device(effect.device)
            doing, start = Doing.RESTORE, effect.start
        else:
            self._read_device(effect.device)
            self._write_host(effect.host)
        self.operations.append(
            Operation(
                ticket=effect.ticket,
                doing=doing,
                host=effect.host,
                device=effect.device,
                start=start,
            )
        )

    def _tell_store(
        self, effect: StartLookup | StartPrefetch | CancelPrefetch | StartPersist | CancelPersist
    ) -> None:
        match effect:
            case StartLookup(ticket=ticket, prompt=prompt, start=start, stop=stop):
                tags = tuple(tag_of(prompt, at) for at in range(start, stop))
                self.operations.append(Operation(ticket=ticket, doing=Doing.LOOKUP, tags=tags))
            case StartPrefetch(ticket=ticket, prompt=prompt, start=start, host=host):
                self._write_host(host)
                tags = tuple(tag_of(prompt, at) for at in range(start, start + len(host)))
                self.operations.append(
                    Operation(ticket=ticket, doing=Doing.READ, host=host, tags=tags)
                )
            case CancelPrefetch(ticket=ticket) | CancelPersist(ticket=ticket):
                if any(one.ticket == ticket and one.is_cancelled for one in self.operations):
                    self.blame(CANCELLED)
                self.operations = [
                    evolve(one, is_cancelled=True) if one.ticket == ticket else one
                    for one in self.operations
                ]
            case StartPersist(ticket=ticket, prompt=prompt, positions=positions):
                self._read_host(effect.host)
                self._read_device(effect.device)
                self.operations.append(
                    Operation(
                        ticket=ticket,
                        doing=Doing.PERSIST,
                        host=effect.host,
                        device=effect.device,
                        tags=tuple(tag_of(prompt, at) for at in positions),
                    )
                )

    def _tell_peer(
        self, effect: SendHold | SendWant | SendCommitted | SendAborted | ClosePeer
    ) -> None:
        """A want under a conversation that is over changes nothing: the news is on its way."""
        if isinstance(effect, SendHold):
            self.talks.append(Talk(ticket=effect.ticket, prompt=effect.prompt))
            return
        for at, talk in enumerate(self.talks):
            if talk.ticket == effect.ticket:
                after = self._told(talk, effect)
                self.talks[at : at + 1] = [] if after is None else [after]
                return

    def _told(
        self, talk: Talk, effect: SendWant | SendCommitted | SendAborted | ClosePeer
    ) -> Talk | None:
        match effect:
            case SendWant(start=start, device=device):
                self._write_device(device)
                tags = tuple(tag_of(talk.prompt, at) for at in range(start, start + len(device)))
                return evolve(
                    talk, tags=talk.tags + tags, places=talk.places + device, is_asked=True
                )
            case SendCommitted():
                if talk.n_landed < len(talk.places):
                    self.blame(UNDELIVERED)
                return None
            case SendAborted():
                return None if talk.has_let_go else evolve(talk, is_aborted=True)
            case ClosePeer():
                if talk.is_closing:
                    self.blame(CANCELLED)
                return evolve(talk, is_closing=True)
