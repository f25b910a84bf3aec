"""Landing, failing and repeating what is outstanding in the simulated ports of a story."""

from collections.abc import Callable, Iterable

from attrs import define, field

from kvlift.core.ids import Attempt, Ticket
from kvlift.core.landed import PeerCause
from kvlift.testing.sim_operation import Kind, Operation
from kvlift.testing.sim_peers import Conversation, PrefillNode, SimPeers
from kvlift.testing.sim_rank import SimRank
from kvlift.testing.story_lines import Landing, Port
from kvlift.testing.story_prompts import StoryPrompt

KINDS = {
    Port.STORE: frozenset({Kind.READ}),
    Port.COPIES: frozenset({Kind.RESTORE}),
    Port.WRITES: frozenset({Kind.MIRROR, Kind.PERSIST}),
    Port.PEER: frozenset[Kind](),
}


class NothingThereError(Exception):
    """A story lands, fails or repeats what is not there."""


@define(eq=False)
class Dock:
    """One rank's outstanding work. `owners`: the request of each ticket, as the driver tells it.

    `marks`: how many operations of the store had been started when a request was last submitted.
    """

    rank: SimRank
    owners: dict[Ticket, str] = field(factory=dict)
    attempts: dict[Attempt, str] = field(factory=dict)
    marks: dict[str, Operation | None] = field(factory=dict)

    def operations(self, port: Port, prompt: StoryPrompt | None) -> list[Operation]:
        """All operations of a port for a request, oldest first, ended ones included.

        Copies carry no request: the driver's word decides, then the tokens, then the contents
        (a request that waits for another one's copy of its own pages).
        """
        started: Iterable[Operation] = [*self.rank.store.log, *self.rank.copies.log]
        mine = [one for one in started if one.kind in KINDS[port]]
        return mine if prompt is None else self.of(mine, prompt)

    def of(self, operations: list[Operation], prompt: StoryPrompt) -> list[Operation]:
        """Those of them that are for this request."""
        owned = [one for one in operations if self.owners.get(one.ticket) == prompt.name]
        asked = [one for one in operations if one.prompt == prompt.prompt]
        held = [one for one in operations if _holds(one, prompt)]
        tests: list[list[Operation]] = [owned, asked, held]
        return next((found for found in tests if any(one.is_outstanding for one in found)), []) or (
            next((found for found in tests if found), [])
        )

    def started_for(self, operations: list[Operation], prompt: StoryPrompt) -> list[Operation]:
        """Those that were started on behalf of this request, not of one that shares its pages."""
        return [
            one
            for one in operations
            if self.owners.get(one.ticket, prompt.name) == prompt.name
            and (one.prompt == prompt.prompt or one.ticket in self.owners)
        ]

    def outstanding(self, port: Port, prompt: StoryPrompt | None) -> list[Operation]:
        return [one for one in self.operations(port, prompt) if one.is_outstanding]

    def end(self, operation: Operation, verb: str, n_pages: int | None = None) -> None:
        """Land an operation, or fail it."""
        match operation.kind:
            case Kind.RESTORE | Kind.MIRROR:
                copies = self.rank.copies
                copies.fail(operation) if verb == "fail" else copies.land(operation)
            case Kind.LOOKUP | Kind.READ | Kind.PERSIST:
                store = self.rank.store
                store.fail(operation) if verb == "fail" else store.land(operation, n_pages)

    def repeat(self, operation: Operation) -> bool:
        """Deliver the report of an ended operation once more."""
        if operation.report is None:
            return False
        is_copy = operation.kind in (Kind.RESTORE, Kind.MIRROR)
        box = self.rank.copies.outbox if is_copy else self.rank.store.outbox
        box.put(operation.report)
        return True

    def mark(self, name: str) -> None:
        """A new attempt of this request begins here."""
        self.marks[name] = self.rank.store.log[-1] if self.rank.store.log else None

    def earlier(self, prompt: StoryPrompt) -> list[Operation]:
        """Reads and lookups of this request that were started before its latest submission."""
        log = list(self.rank.store.log)
        mark = self.marks.get(prompt.name)
        before = log[: log.index(mark) + 1] if mark in log else []
        return [one for one in before if one.kind is not Kind.PERSIST and _holds(one, prompt)]


def _holds(operation: Operation, prompt: StoryPrompt) -> bool:
    values = [value for value in operation.values if value is not None]
    return bool(values) and all(prompt.is_mine(value) for value in values)


@define(eq=False)
class Harbour:
    """The docks of all ranks and the prefill node."""

    docks: list[Dock]
    node: PrefillNode

    def carry_out(self, order: Landing, prompt: StoryPrompt | None) -> None:
        """Raises `NothingThereError` when no rank has what the story names."""
        docks = self.docks if order.rank is None else [self.docks[order.rank]]
        if order.port is None:
            for dock in docks:
                self._land_all(dock)
            return
        self._check_silence(order)
        deed = self._deed(order, prompt)
        had_something = [deed(dock) for dock in docks]
        if not any(had_something):
            what = order.port.value
            whose = "" if prompt is None else f" for {prompt.name}"
            raise NothingThereError(f"nothing to {order.verb}: {what} has nothing{whose}")

    def _check_silence(self, order: Landing) -> None:
        is_silent = self.docks[0].rank.store.is_silent if order.port is Port.STORE else False
        if order.port is Port.PEER:
            is_silent = self.node.is_silent or not self.node.is_alive
        if is_silent and order.verb == "land":
            raise NothingThereError(f"the {order.port.value if order.port else ''} answers no more")

    def _deed(self, order: Landing, prompt: StoryPrompt | None) -> Callable[[Dock], bool]:
        if order.port is Port.PEER and prompt is not None:
            return lambda dock: self._peer(dock.rank.peers, order, prompt.name)
        match order.verb:
            case "again":
                return lambda dock: _again(dock, order, prompt)
            case "late":
                return lambda dock: prompt is not None and _late(dock, prompt)
            case "land" | "fail":
                return lambda dock: _end(dock, order, prompt)

    def _peer(self, peers: SimPeers, order: Landing, name: str) -> bool:
        talks = [talk for node, talk in peers.open_talks() if talk.rid == name and node is not None]
        said = [talk for talk in peers.log if talk.rid == name]
        match order.verb:
            case "land":
                return self._peer_lands(peers, talks, order.n_pages)
            case "fail":
                for talk in talks:
                    reason = f"{self.node.name} could not send the pages of {name}"
                    peers.fail(talk, PeerCause.GONE, reason)
                return bool(talks)
            case "again" | "late":
                return bool(said) and peers.repeat(said[-1])

    def _peer_lands(self, peers: SimPeers, talks: list[Conversation], n_pages: int | None) -> bool:
        awaited = [talk for talk in talks if self.node.n_sendable(talk)]
        if not awaited:
            return False
        n_sendable = self.node.n_sendable(awaited[-1])
        if n_pages is not None and n_pages > n_sendable:
            raise NothingThereError(
                f"the peer was asked for {n_sendable} more pages, not {n_pages}"
            )
        return peers.send_rest(self.node, awaited[-1], n_pages) > 0

    def _land_all(self, dock: Dock) -> None:
        for port in (Port.STORE, Port.COPIES, Port.WRITES):
            is_silent = dock.rank.store.is_silent
            for operation in dock.outstanding(port, None):
                if not (is_silent and operation.kind in (Kind.READ, Kind.PERSIST)):
                    dock.end(operation, "land")
        if self.node.is_alive and not self.node.is_silent:
            for _node, talk in dock.rank.peers.open_talks():
                dock.rank.peers.send_rest(self.node, talk, None)


def _end(dock: Dock, order: Landing, prompt: StoryPrompt | None) -> bool:
    assert order.port is not None
    found = dock.outstanding(order.port, prompt)
    if order.port is not Port.WRITES:
        found = found[:1]
    for operation in found:
        if order.n_pages is not None and order.n_pages > len(operation.values):
            raise NothingThereError(f"that read is of {len(operation.values)} pages")
        dock.end(operation, order.verb, order.n_pages)
    return bool(found)


def _again(dock: Dock, order: Landing, prompt: StoryPrompt | None) -> bool:
    assert order.port is not None
    found = [one for one in dock.operations(order.port, prompt) if one.report is not None]
    if not found and order.port is Port.STORE and prompt is not None:
        answered = [one for one in dock.rank.store.log if one.report and _holds(one, prompt)]
        found = [one for one in answered if one.kind is Kind.LOOKUP]
    return bool(found) and dock.repeat(found[-1])


def _late(dock: Dock, prompt: StoryPrompt) -> bool:
    """An answer of an earlier attempt: its read ends only now, or its report comes once more."""
    earlier = dock.earlier(prompt)
    waiting = [one for one in earlier if one.is_outstanding]
    if waiting:
        dock.end(waiting[0], "land")
        return True
    ended = [one for one in earlier if one.report is not None]
    if not ended:
        ended = [one for one in dock.operations(Port.STORE, prompt) if one.report is not None]
    reads = [one for one in ended if one.kind is Kind.READ]
    return bool(ended) and dock.repeat((reads or ended)[-1])
