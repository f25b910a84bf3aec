"""Reads, copies, writes and messages of a retold run: they end as those of the recorded run did."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from attrs import define, field

from kvlift.core.ids import Ticket
from kvlift.core.landed import (
    Landed,
    LookupAnswered,
    MirrorEnded,
    PagesArrived,
    PeerCause,
    PeerFailed,
    PeerLetGo,
    PersistEnded,
    PrefetchEnded,
    RestoreEnded,
)
from kvlift.testing.sim.scribe import Errand, Errands, Scribe
from kvlift.testing.sim_operation import Kind, Operation
from kvlift.testing.sim_peers import Conversation
from kvlift.testing.story_lines import Port
from kvlift.testing.story_stage import Stage

PORTS: Final = {
    Kind.READ: Port.STORE,
    Kind.RESTORE: Port.COPIES,
    Kind.MIRROR: Port.WRITES,
    Kind.PERSIST: Port.WRITES,
}

ALL: Final = 1 << 30
"""More pages than there are."""

Due = tuple[int, Ticket, Landed]
"""The tick behind which it comes, the ticket on the stage, and what was reported in the run."""


@define(eq=False)
class Behind:
    """What comes behind each tick. `tell`: play a line; False where it had nothing to act on."""

    stage: Stage
    scribes: Sequence[Scribe]
    tell: Callable[[str], bool]
    errands: Errands = field(factory=Errands)
    _reports: "list[dict[Errand, list[tuple[int, Landed]]]]" = field(init=False)
    _due: list[list[Due]] = field(init=False)
    _planned: set[Ticket] = field(factory=set)

    def __attrs_post_init__(self) -> None:
        self._reports = [_by_errand(scribe) for scribe in self.scribes]
        self._due = [[] for _ in self.scribes]

    def answer_lookups(self) -> None:
        """What storage will answer at the next tick is what it answered in the run."""
        for number, rank in enumerate(self.stage.ranks):
            for operation in list(rank.store.log):
                if operation.kind is Kind.LOOKUP and operation.is_outstanding:
                    self._adjust(number, operation)

    def _adjust(self, number: int, operation: Operation) -> None:
        name = self._name_of(number, operation.ticket)
        reports = self._reports_of(number, operation.ticket)
        answers = [report for _tick, report in reports if isinstance(report, LookupAnswered)]
        if not answers or not name or operation.prompt is None:
            return
        size = 4 * operation.prompt.page_tokens
        stored = self.stage.ranks[number].store.pages
        start = operation.values[0]
        assert start is not None
        first = len(start.tokens) // size - 1
        stop = first + answers[0].n_pages
        is_there = [value in stored for value in operation.values]
        if not all(is_there[: answers[0].n_pages]):
            self.tell(f"put {name}[{first}:{stop}] in storage rank={number}")
        if any(is_there[answers[0].n_pages :][:1]):
            self.tell(f"lose {name}[{stop}] from storage rank={number}")

    def look(self, tick: int) -> None:
        """After a tick: what was opened in it is given its end, and what is due now lands."""
        agreed = self.stage.drivers[0].state.agreed
        self.errands.look(agreed)
        for ticket in agreed.tickets:
            if ticket not in self._planned:
                self._planned.add(ticket)
                for number in range(len(self.scribes)):
                    self._plan(number, ticket, tick)
        for number, due in enumerate(self._due):
            now = [one for one in due if one[0] <= tick]
            kept = [one for one in due if one[0] > tick]
            self._due[number] = kept
            kept += [one for one in now if not self._happens(number, one[1], one[2])]

    def _plan(self, number: int, ticket: Ticket, tick: int) -> None:
        errand = self.errands.by_ticket[ticket]
        opened = self.scribes[number].errands.opened.get(errand)
        if opened is None:  # the run had no such errand: all goes well, at once
            self._due[number].append((tick, ticket, PrefetchEnded(ticket, ALL)))
            self._due[number].append((tick, ticket, PagesArrived(ticket, ALL)))
            return
        for heard, report in self._reports_of(number, ticket):
            self._due[number].append((tick + max(1, heard - opened) - 1, ticket, report))

    def _reports_of(self, number: int, ticket: Ticket) -> list[tuple[int, Landed]]:
        errand = self.errands.by_ticket.get(ticket)
        return [] if errand is None else self._reports[number].get(errand, [])

    def _name_of(self, number: int, ticket: Ticket) -> str:
        return self.stage.harbour.docks[number].owners.get(ticket, "")

    def _happens(self, number: int, ticket: Ticket, report: Landed) -> bool:
        """False: not yet."""
        match report:
            case PrefetchEnded() | RestoreEnded() | MirrorEnded() | PersistEnded():
                return self._ends(number, ticket, report.n_pages)
            case PagesArrived() | PeerFailed() | PeerLetGo():
                talk = self._talk(number, ticket)
                return talk is None or self._peer_says(number, talk, report)
            case _:
                return True

    def _ends(self, number: int, ticket: Ticket, n_pages: int) -> bool:
        dock = self.stage.harbour.docks[number]
        log = (*dock.rank.store.log, *dock.rank.copies.log)
        own = [one for one in log if one.ticket == ticket]
        operation = next((one for one in own if one.is_outstanding), own[-1] if own else None)
        if operation is None:
            return ticket not in self.stage.drivers[number].state.agreed.tickets
        name, port = self._name_of(number, ticket), PORTS.get(operation.kind)
        prompt = self.stage.prompts.by_name.get(name)
        if port is None or prompt is None:
            return True
        where = f"{port.value} {name} rank={number}"
        if not operation.is_outstanding:
            self.tell(f"again {where}")
            return True
        waiting = dock.outstanding(port, prompt)
        if operation not in (waiting if port is Port.WRITES else waiting[:1]):
            return False
        if n_pages == 0:
            self.tell(f"fail {where}")
        elif port is Port.STORE and n_pages < len(operation.values):
            self.tell(f"land {port.value} {name} pages={n_pages} rank={number}")
        else:
            self.tell(f"land {where}")
        return True

    def _talk(self, number: int, ticket: Ticket) -> Conversation | None:
        """The conversation, while the node may still say something in it."""
        talks = [talk for _node, talk in self.stage.ranks[number].peers.open_talks()]
        return next((talk for talk in talks if talk.ticket == ticket), None)

    def _peer_says(self, number: int, talk: Conversation, report: Landed) -> bool:
        where = f"{talk.rid} rank={number}"
        match report:
            case PagesArrived(n_pages=n_total):
                if not talk.is_open or talk.n_landed >= n_total:
                    return True
                n_pages = min(n_total - talk.n_landed, self.stage.node.n_sendable(talk))
                if n_pages > 0:
                    self.tell(f"land peer {talk.rid} pages={n_pages} rank={number}")
                return talk.n_landed >= n_total
            case PeerFailed(cause=PeerCause.REFUSED):
                if talk.refusal is None and not talk.has_failed:
                    self.tell(f'reject peer {talk.rid} reason="busy"')
            case PeerFailed():
                if not talk.has_failed:
                    self.tell(f"fail peer {where}")
            case PeerLetGo():
                if talk.is_aborted and not talk.has_let_go:
                    self.tell(f"ack peer {where}")
                return talk.has_let_go
            case _:
                pass
        return True


def _by_errand(scribe: Scribe) -> "dict[Errand, list[tuple[int, Landed]]]":
    """(The tick in which it was heard, the report) by what it was about."""
    found: dict[Errand, list[tuple[int, Landed]]] = defaultdict(list)
    for entry in scribe.entries:
        for report in entry.reports:
            errand = scribe.errands.by_ticket.get(report.ticket)
            if errand is not None:
                found[errand].append((entry.tick, report))
    return found
