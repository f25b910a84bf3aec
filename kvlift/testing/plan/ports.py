"""The ports of a planned node: nothing is moved, everything takes its time.

Every way has a rate and does one thing after the other: the link, reads and writes of storage,
copies up and copies down.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from attrs import define, field

from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.keys import page_keys
from kvlift.core.landed import (
    Landed,
    LookupAnswered,
    MirrorEnded,
    PagesArrived,
    PeerLetGo,
    PersistEnded,
    PrefetchEnded,
    RestoreEnded,
    TokenArrived,
)
from kvlift.core.prompt import Prompt
from kvlift.effects.ports import PageRun
from kvlift.runtime.demo.trace import BLOCK_TOKENS
from kvlift.testing.plan.sizes import NS, Rates
from kvlift.testing.sim.agenda import Agenda

LOOKUP_NS = 1_000_000
ACK_NS = 1_000_000


@define(eq=False)
class Way:
    """One thing after the other. `free_ns`: when the last one is over."""

    agenda: Agenda
    page_ns: int
    free_ns: int = 0

    def carry(self, n_pages: int, then: Callable[[], None], not_before_ns: int = 0) -> None:
        """`not_before_ns`: the last page is not there to be carried earlier."""
        self.free_ns = max(self.free_ns, self.agenda.now_ns) + n_pages * self.page_ns
        self.agenda.after(
            max(self.free_ns, not_before_ns + self.page_ns) - self.agenda.now_ns, then
        )


@define(eq=False)
class Box:
    """Reports that wait for the next tick."""

    reports: list[Landed] = field(factory=list)

    def landed(self) -> list[Landed]:
        found, self.reports = self.reports, []
        return found

    def close(self, deadline_s: float) -> bool:
        del deadline_s
        return True


@define(eq=False)
class PlannedCopies(Box):
    up: Way = field(kw_only=True)
    down: Way = field(kw_only=True)

    def start_restore(
        self,
        ticket: Ticket,
        host_pages: Sequence[int],
        device_pages: Sequence[int],
        start: int = 0,
    ) -> None:
        n = len(host_pages)
        self.up.carry(n, lambda: self.reports.append(RestoreEnded(ticket, n, start)))

    def start_mirror(
        self, ticket: Ticket, device_pages: Sequence[int], host_pages: Sequence[int]
    ) -> None:
        n = len(host_pages)
        self.down.carry(n, lambda: self.reports.append(MirrorEnded(ticket, n)))


@define(eq=False)
class Shelf:
    """The pages that storage holds, for all nodes; the one that was used longest ago goes first."""

    n_pages_max: int
    keys: "OrderedDict[bytes, None]" = field(factory=OrderedDict)

    def put(self, key: bytes) -> None:
        if self.n_pages_max:
            self.keys[key] = None
            self.keys.move_to_end(key)
            if len(self.keys) > self.n_pages_max:
                self.keys.popitem(last=False)


@define(eq=False)
class PlannedStore(Box):
    shelf: Shelf = field(kw_only=True)
    reading: Way = field(kw_only=True)
    writing: Way = field(kw_only=True)

    def start_lookup(self, ticket: Ticket, run: PageRun) -> None:
        n_found = self._n_present(keys_of(run))
        answer = LookupAnswered(ticket, n_found)
        self.reading.agenda.after(LOOKUP_NS, lambda: self.reports.append(answer))

    def start_prefetch(self, ticket: Ticket, run: PageRun, host_pages: Sequence[int]) -> None:
        keys = keys_of(run)

        def end() -> None:
            n_found = self._n_present(keys)
            for key in keys[:n_found]:
                self.shelf.put(key)
            self.reports.append(PrefetchEnded(ticket, n_found))

        self.reading.carry(len(keys), end)

    def start_persist(self, ticket: Ticket, run: PageRun, host_pages: Sequence[int]) -> None:
        keys = keys_of(run)

        def end() -> None:
            for key in keys:
                self.shelf.put(key)
            self.reports.append(PersistEnded(ticket, len(keys)))

        n_new = sum(key not in self.shelf.keys for key in keys)
        self.writing.carry(n_new, end)

    def start_persist_device(
        self, ticket: Ticket, run: PageRun, device_pages: Sequence[int]
    ) -> None:
        self.start_persist(ticket, run, device_pages)

    def cancel_prefetch(self, ticket: Ticket) -> None:
        """It ends by itself."""

    def cancel_persist(self, ticket: Ticket) -> None:
        """It ends by itself."""

    def forget_all(self) -> None:
        self.shelf.keys.clear()

    def _n_present(self, keys: Sequence[bytes]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self.shelf.keys), len(keys))


def keys_of(run: PageRun) -> list[bytes]:
    prompt = run.prompt
    keys = list(page_keys(prompt.namespace, prompt.tokens, prompt.page_tokens))
    return [keys[position] for position in run.positions]


@define(eq=False)
class Prefill:
    """All prefill nodes as one that is never full, with an ideal cache: what was computed once is
    there. `computed`: keys of pages; `n_tokens_of`: of a request's prompt."""

    rates: Rates
    n_tokens_of: Callable[[str], int]
    computed: set[bytes] = field(factory=set)

    def begin(self, rid: str, prompt: Prompt, now_ns: int) -> tuple[int, int]:
        """The pages that are there, and when all others are."""
        keys = list(page_keys(prompt.namespace, prompt.tokens, prompt.page_tokens))
        n_known = next((at for at, key in enumerate(keys) if key not in self.computed), len(keys))
        self.computed.update(keys)
        n_tokens = max(1, self.n_tokens_of(rid) - n_known * BLOCK_TOKENS)
        return n_known, now_ns + round(n_tokens / self.rates.prefill_tokens_per_s * NS)


@define(eq=False)
class Talk:
    n_pages_known: int
    done_ns: int
    n_arrived: int = 0
    has_token: bool = False


@define(eq=False)
class PlannedPeers(Box):
    """`n_bytes`: what has come over the link."""

    prefill: Prefill = field(kw_only=True)
    link: Way = field(kw_only=True)
    n_bytes: int = 0
    _talks: dict[Ticket, Talk] = field(factory=dict)

    def send_hold(
        self, ticket: Ticket, rid: Rid, attempt: Attempt, peer: str, prompt: Prompt
    ) -> None:
        now_ns = self.link.agenda.now_ns
        self._talks[ticket] = Talk(*self.prefill.begin(rid, prompt, now_ns))

    def send_want(
        self, ticket: Ticket, start: int, device_pages: Sequence[int], promise: int
    ) -> None:
        talk, n_pages = self._talks[ticket], len(device_pages)
        is_known = start + n_pages <= talk.n_pages_known

        def arrive() -> None:
            talk.n_arrived += n_pages
            self.n_bytes += n_pages * self.prefill.rates.page_bytes
            self.reports.append(PagesArrived(ticket, talk.n_arrived))

        if n_pages:
            self.link.carry(n_pages, arrive, 0 if is_known else talk.done_ns)
        if not talk.has_token:
            talk.has_token = True
            token = TokenArrived(ticket, 0, 0.0)
            wait_ns = talk.done_ns - self.link.agenda.now_ns
            self.link.agenda.after(wait_ns, lambda: self.reports.append(token))

    def send_committed(self, ticket: Ticket) -> None:
        self._talks.pop(ticket, None)

    def send_aborted(self, ticket: Ticket) -> None:
        self.link.agenda.after(ACK_NS, lambda: self.reports.append(PeerLetGo(ticket)))

    def close_peer(self, ticket: Ticket) -> None:
        """Nobody is silent here."""
