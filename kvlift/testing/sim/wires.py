"""Prefill nodes in virtual time: pages in pieces, first tokens, confirmations.

Also how long each of them has been owed to a rank: a request whose node was late is excused.
"""

from collections.abc import Callable
from random import Random

from attrs import define, field

from kvlift.core.landed import TokenArrived
from kvlift.testing.sim.agenda import Agenda, some_of
from kvlift.testing.sim.excuses import Excuses
from kvlift.testing.sim.faults import Faults
from kvlift.testing.sim.plan import NS_PER_MS, Plan
from kvlift.testing.sim_peers import Conversation, PrefillNode
from kvlift.testing.sim_rank import SimRank

LATE_PERCENT = 90
"""Of a deadline: a node that owed something for this long was late (clocks differ)."""


@define(eq=False)
class Care:
    """One conversation: what is on its way, and since when something is owed."""

    node: PrefillNode
    talk: Conversation
    is_piece_due: bool = False
    is_token_due: bool = False
    is_ack_due: bool = False
    pages_owed_ns: int | None = None
    token_owed_ns: int | None = None
    ack_owed_ns: int | None = None
    n_wants: int = 0


@define(eq=False)
class Wires:
    """One rank's conversations. `token_of`: the first token of a request."""

    plan: Plan
    faults: Faults
    agenda: Agenda
    excuses: Excuses
    rank: SimRank
    draw: Random
    token_of: Callable[[Conversation], int]
    n_widened: int = 0
    _cares: dict[int, Care] = field(factory=dict)

    def look(self) -> None:
        """After a tick: what was asked for goes on its way, what is owed too long is noted."""
        open_now = {}
        for node, talk in self.rank.peers.open_talks():
            if node is not None:
                care = self._cares.get(talk.ticket) or Care(node, talk)
                open_now[int(talk.ticket)] = care
                self._look(care)
        self._cares = open_now

    def _look(self, care: Care) -> None:
        talk, node = care.talk, care.node
        if talk.n_wants > care.n_wants:
            self.n_widened += talk.n_wants - max(1, care.n_wants)
            care.n_wants = talk.n_wants
        self._note_debts(care)
        if node.is_silent or not node.is_alive:
            return
        if care.pages_owed_ns is not None and not care.is_piece_due:
            care.is_piece_due = True
            self.agenda.after(self._delay_ns(self.plan.delays.piece_ns), lambda: self._piece(care))
        if care.token_owed_ns is not None and not care.is_token_due:
            care.is_token_due = True
            self.agenda.after(self._delay_ns(self.plan.delays.token_ns), lambda: self._token(care))
        if care.ack_owed_ns is not None and not care.is_ack_due:
            care.is_ack_due = True
            self.agenda.after(self._ack_delay_ns(), lambda: self._acknowledge(care))

    def _note_debts(self, care: Care) -> None:
        talk, node, now_ns = care.talk, care.node, self.agenda.now_ns
        owes_pages = node.n_sendable(talk) > 0
        care.pages_owed_ns = _since(care.pages_owed_ns, now_ns, owes=owes_pages)
        is_listening = talk.is_open and not talk.is_aborted
        owes_token = is_listening and talk.token is None and node.is_asked(talk)
        care.token_owed_ns = _since(care.token_owed_ns, now_ns, owes=owes_token)
        owes_ack = talk.is_aborted and not talk.has_let_go
        care.ack_owed_ns = _since(care.ack_owed_ns, now_ns, owes=owes_ack)
        deadline_ns = self._late_ns(self.plan.config.transfer_deadline_ms)
        for owed_ns in (care.pages_owed_ns, care.token_owed_ns):
            if owed_ns is not None and now_ns - owed_ns >= deadline_ns:
                self.excuses.request(talk.rid, now_ns, "its prefill node was late")
        quarantine_ns = self._late_ns(self.plan.config.quarantine_max_ms)
        if care.ack_owed_ns is not None and now_ns - care.ack_owed_ns >= quarantine_ns:
            self.excuses.node_was_bad(node.name, now_ns, "the node did not confirm an abort")

    def _late_ns(self, deadline_ms: int) -> int:
        return deadline_ms * NS_PER_MS * LATE_PERCENT // 100

    def _delay_ns(self, usual_ns: int) -> int:
        deadline_ns = self.plan.config.transfer_deadline_ms * NS_PER_MS
        if self.faults.strikes("peer_late"):
            return int(deadline_ns * self.faults.stream("peer_late").uniform(1.05, 2))
        if self.faults.strikes("peer_slow"):
            return some_of(self.faults.stream("peer_slow"), deadline_ns * 3 // 10)
        return some_of(self.draw, usual_ns)

    def _ack_delay_ns(self) -> int:
        quarantine_ns = self.plan.config.quarantine_max_ms * NS_PER_MS
        if self.faults.strikes("peer_late"):
            return int(quarantine_ns * self.faults.stream("peer_late").uniform(1.05, 2))
        if self.faults.strikes("peer_slow"):
            return some_of(self.faults.stream("peer_slow"), quarantine_ns * 3 // 10)
        return some_of(self.draw, self.plan.delays.ack_ns)

    def _piece(self, care: Care) -> None:
        """The next pages arrive; if more are owed, the piece after them is on its way."""
        care.is_piece_due = False
        node, talk = care.node, care.talk
        self._note_debts(care)
        n_left = node.n_sendable(talk)
        if node.is_silent or not node.is_alive or not n_left:
            return
        n_pages = n_left
        if self.faults.strikes("peer_pieces"):
            n_pages = 1
        elif self.draw.random() < 0.3:
            n_pages = self.draw.randint(1, n_left)
        self.rank.peers.send_rest(node, talk, n_pages)
        self._perhaps_twice(talk)
        care.pages_owed_ns = None
        self._look(care)

    def _token(self, care: Care) -> None:
        care.is_token_due = False
        node, talk = care.node, care.talk
        self._note_debts(care)
        if node.is_silent or not node.is_alive or care.token_owed_ns is None:
            return
        talk.token = TokenArrived(talk.ticket, self.token_of(talk), -0.5)
        self.rank.peers.outbox.put(talk.token)
        self._perhaps_twice(talk)
        self._note_debts(care)

    def _acknowledge(self, care: Care) -> None:
        care.is_ack_due = False
        self._note_debts(care)
        if not care.node.is_silent and care.node.is_alive:
            self.rank.peers.acknowledge(care.talk)

    def _perhaps_twice(self, talk: Conversation) -> None:
        if self.faults.strikes("duplicate"):
            self.rank.peers.repeat(talk)

    def lose(self, node: PrefillNode) -> None:
        """This rank notices that the node's connection is closed."""
        self.rank.peers.lose_node(node)


def _since(before_ns: int | None, now_ns: int, *, owes: bool) -> int | None:
    if not owes:
        return None
    return now_ns if before_ns is None else before_ns
