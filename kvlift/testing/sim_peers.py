"""A simulated prefill node, and each decode rank's wire to it."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256

from attrs import define, field

from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.landed import (
    Landed,
    PagesArrived,
    PeerCause,
    PeerFailed,
    PeerLetGo,
    TokenArrived,
)
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier
from kvlift.testing.sim_memory import Access, Mode, SimMemory, page_value
from kvlift.testing.sim_operation import LOG_LENGTH, Calls, Outbox

Sampled = tuple[int, float]
"""A token and its log-probability."""


def token_after(_rid: Rid, prompt: Prompt) -> Sampled:
    """A first token that depends on the prompt alone."""
    digest = sha256(prompt.namespace + prompt.tokens).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFF_FFFF, -digest[4] / 64


@define(eq=False)
class Conversation:
    """All that one rank and the node have said to each other about one attempt of one request.

    `asked` are (position, device page) in the order of the wants; the first `n_landed` have come.
    """

    rank: int
    ticket: Ticket
    rid: Rid
    attempt: Attempt
    prompt: Prompt
    asked: list[tuple[int, int]] = field(factory=list)
    n_wants: int = 0
    n_landed: int = 0
    promise: int | None = None
    token: TokenArrived | None = None
    refusal: str | None = None
    has_expired: bool = False
    has_failed: bool = False
    is_committed: bool = False
    is_aborted: bool = False
    has_let_go: bool = False
    last_report: Landed | None = None

    @property
    def is_open(self) -> bool:
        """Whether the node may still send something."""
        return not (self.has_failed or self.is_committed or self.has_let_go)

    def positions(self) -> frozenset[int]:
        return frozenset(position for position, _page in self.asked)


@define(eq=False)
class PrefillNode:
    """The node behind one address. It sends when the wants of all `n_ranks` are there and equal.

    `mode` HELD: pages come when told to, the first token with the last of them (at once where no
    page is wanted), and an abort is confirmed by `acknowledge` alone. `first_token` gives None
    while it is not sampled yet.
    """

    name: str
    n_ranks: int = 1
    mode: Mode = Mode.AUTO
    is_alive: bool = True
    is_silent: bool = False
    incarnation: int = 1
    first_token: Callable[[Rid, Prompt], Sampled | None] = token_after
    refusals: dict[Rid, str] = field(factory=dict)
    expired: set[Rid] = field(factory=set)
    attempts: dict[tuple[Rid, Attempt], dict[int, Conversation]] = field(factory=dict)

    def join(self, conversation: Conversation) -> None:
        """A rank announces an attempt; what was said of its request before now applies to it."""
        key = (conversation.rid, conversation.attempt)
        ranks = self.attempts.setdefault(key, {})
        ranks[conversation.rank] = conversation
        conversation.refusal = self.refusals.get(conversation.rid)
        conversation.has_expired = conversation.rid in self.expired
        if len(ranks) == self.n_ranks:
            self.refusals.pop(conversation.rid, None)
            self.expired.discard(conversation.rid)
        if len(self.attempts) > LOG_LENGTH:
            del self.attempts[next(iter(self.attempts))]

    def of_attempt(self, conversation: Conversation) -> dict[int, Conversation]:
        """This conversation and its fellows of the other ranks, by rank."""
        return self.attempts.get((conversation.rid, conversation.attempt), {})

    def n_sendable(self, conversation: Conversation) -> int:
        """Pages that every rank has asked for and this one has not received."""
        ranks = self.of_attempt(conversation)
        if not conversation.is_open or len(ranks) < self.n_ranks:
            return 0
        agreed = min(len(one.asked) for one in ranks.values())
        return max(0, agreed - conversation.n_landed)

    def is_asked(self, conversation: Conversation) -> bool:
        """Whether every rank has sent its first want."""
        ranks = self.of_attempt(conversation)
        return len(ranks) == self.n_ranks and all(one.n_wants > 0 for one in ranks.values())

    def differs(self, conversation: Conversation) -> bool:
        """Whether two ranks have asked for different pages, as far as both have asked."""
        places = [[position for position, _page in conversation.asked]]
        places += [
            [at for at, _page in one.asked] for one in self.of_attempt(conversation).values()
        ]
        return any(len(set(column)) > 1 for column in zip(*places, strict=False))

    def refuse(self, rid: str, reason: str, talks: Sequence[Conversation]) -> None:
        """Refuse a request: its open conversations, or the next one where there is none."""
        if not talks:
            self.refusals[Rid(rid)] = reason
        for talk in talks:
            talk.refusal = reason

    def expire(self, rid: str, talks: Sequence[Conversation]) -> None:
        """The lease ends: what has not been sent by now cannot be sent any more."""
        if not talks:
            self.expired.add(Rid(rid))
        for talk in talks:
            talk.has_expired = True

    def revive(self) -> None:
        """A new incarnation behind the same address; it knows none of the old requests."""
        self.is_alive, self.is_silent = True, False
        self.incarnation += 1


@define(eq=False)
class SimPeers:
    """The peers port of one rank. `nodes`: by address; an unknown address is a dead node."""

    nodes: Mapping[str, PrefillNode]
    rank: int
    memory: SimMemory
    log: deque[Conversation] = field(factory=lambda: deque(maxlen=LOG_LENGTH))
    outbox: Outbox = field(factory=Outbox)
    calls: Calls = field(factory=Calls)
    _open: dict[Ticket, tuple[PrefillNode | None, Conversation]] = field(factory=dict)

    def send_hold(
        self, ticket: Ticket, rid: Rid, attempt: Attempt, peer: str, prompt: Prompt
    ) -> None:
        self.calls.begin("SendHold", ticket)
        node = self.nodes.get(peer)
        talk = Conversation(self.rank, ticket, rid, attempt, prompt)
        self.log.append(talk)
        self._open[ticket] = (node, talk)
        if node is None or not node.is_alive:
            self._lose(talk, peer)
        else:
            node.join(talk)

    def send_want(
        self, ticket: Ticket, start: int, device_pages: Sequence[int], promise: int
    ) -> None:
        self.calls.add("SendWant")
        if ticket not in self._open:
            return  # over already, and the report that says so is on its way
        _node, talk = self._open[ticket]
        talk.n_wants += 1
        talk.promise = promise
        for position, page in enumerate(device_pages, start):
            talk.asked.append((position, page))
            self.memory.device[page] = None

    def send_committed(self, ticket: Ticket) -> None:
        self.calls.add("SendCommitted")
        for talk in self._said(ticket):
            talk.is_committed = True
        self._open.pop(ticket, None)

    def send_aborted(self, ticket: Ticket) -> None:
        self.calls.add("SendAborted")
        for talk in self._said(ticket):
            talk.is_aborted = True

    def close_peer(self, ticket: Ticket) -> None:
        self.calls.add("ClosePeer")
        if ticket in self._open:
            closed = self._open[ticket][0]
            for node, talk in list(self._open.values()):
                if node is closed:
                    self._lose(talk, "?" if node is None else node.name)

    def landed(self) -> list[Landed]:
        for node, talk in list(self._open.values()):
            if node is not None:
                self._settle(node, talk)
        self._forget_ended()
        return self.outbox.drain()

    def close(self, deadline_s: float) -> bool:
        """False while a node may still write into pages of this rank."""
        del deadline_s  # nothing held lands by waiting for it
        return not any(True for _access in self.accesses())

    def land(self, talk: Conversation, n_pages: int) -> None:
        """The next `n_pages` of the wanted ones arrive, in the order in which they were asked."""
        arrived = talk.asked[talk.n_landed : talk.n_landed + n_pages]
        for position, page in arrived:
            self.memory.device[page] = page_value(talk.prompt, position)
        talk.n_landed += len(arrived)
        self._report(talk, PagesArrived(talk.ticket, talk.n_landed))

    def fail(self, talk: Conversation, cause: PeerCause, reason: str) -> None:
        """The node can't give more, and says so after its last write."""
        if not talk.has_failed:
            talk.has_failed = True
            self._report(talk, PeerFailed(talk.ticket, cause, reason))
        self._let_go(talk)

    def send_rest(self, node: PrefillNode, talk: Conversation, n_pages: int | None) -> int:
        """Land up to `n_pages` (None: all) of what the node may send now; the number that came."""
        n_sendable = node.n_sendable(talk)
        n_sent = n_sendable if n_pages is None else min(n_pages, n_sendable)
        if n_sent:
            self.land(talk, n_sent)
        return n_sent

    def acknowledge(self, talk: Conversation) -> None:
        """The node confirms an abort; nothing to confirm is nothing."""
        if talk.is_aborted:
            self._let_go(talk)

    def lose_node(self, lost: PrefillNode) -> None:
        """The connection to this node is closed."""
        for node, talk in list(self._open.values()):
            if node is lost:
                self._lose(talk, lost.name)

    def open_talks(self) -> list[tuple[PrefillNode | None, Conversation]]:
        return list(self._open.values())

    def repeat(self, talk: Conversation) -> bool:
        """Deliver the last reports of a conversation once more; False if there was none."""
        said = [report for report in (talk.last_report, talk.token) if report is not None]
        for report in said:
            self.outbox.put(report)
        return bool(said)

    def accesses(self) -> Iterator[Access]:
        """The remote writes that are not proven to be over."""
        for _node, talk in self._open.values():
            pages = tuple(page for _position, page in talk.asked[talk.n_landed :])
            if pages and not talk.has_let_go:
                yield Access(talk.ticket, Tier.DEVICE, "writes", pages)

    def _said(self, ticket: Ticket) -> list[Conversation]:
        """The conversation of a ticket, over or not; none for one that was never announced."""
        if ticket in self._open:
            return [self._open[ticket][1]]
        return [talk for talk in reversed(self.log) if talk.ticket == ticket][:1]

    def _settle(self, node: PrefillNode, talk: Conversation) -> None:
        """What the node does by itself before the next tick."""
        if node.is_silent or not node.is_alive:
            return
        if talk.is_open and talk.refusal is not None:
            reason = f"{node.name} refused request {talk.rid}: {talk.refusal}"
            self.fail(talk, PeerCause.REFUSED, reason)
        if talk.is_open and talk.has_expired and talk.n_landed < len(talk.asked):
            reason = f"{node.name} no longer has the pages of {talk.rid}: its lease has ended"
            self.fail(talk, PeerCause.GONE, reason)
        if talk.is_open and node.differs(talk):
            reason = f"{node.name} was asked for different pages of {talk.rid} by the ranks"
            self.fail(talk, PeerCause.MISMATCH, reason)
        if node.mode is Mode.AUTO and not talk.is_aborted and node.n_sendable(talk):
            self.land(talk, node.n_sendable(talk))
        if talk.is_open and talk.token is None and self._is_token_due(node, talk):
            sampled = node.first_token(talk.rid, talk.prompt)
            if sampled is not None:
                talk.token = TokenArrived(talk.ticket, *sampled)
                self.outbox.put(talk.token)
        if node.mode is Mode.AUTO and talk.is_aborted:
            self._let_go(talk)

    def _is_token_due(self, node: PrefillNode, talk: Conversation) -> bool:
        return node.is_asked(talk) and talk.n_landed == len(talk.asked) and not talk.is_aborted

    def _report(self, talk: Conversation, report: Landed) -> None:
        talk.last_report = report
        self.outbox.put(report)

    def _lose(self, talk: Conversation, name: str) -> None:
        """A closed connection fails what is open; what was aborted has ended for us already."""
        if talk.is_aborted:
            self._let_go(talk)
        else:
            self.fail(talk, PeerCause.LOST, f"the connection to {name} is lost")

    def _let_go(self, talk: Conversation) -> None:
        if not talk.has_let_go:
            talk.has_let_go = True
            self.outbox.put(PeerLetGo(talk.ticket))

    def _forget_ended(self) -> None:
        """Conversations that the core has ended and nothing writes for any more."""
        for ticket, (_node, talk) in list(self._open.items()):
            if talk.has_let_go and (talk.is_aborted or talk.has_failed):
                del self._open[ticket]
