"""The pure core without ports: one rank, or several, whose reports a test writes by hand."""

from collections.abc import Iterable

from attrs import define, field

from kvlift.core.advance import Decision, Outcome, State, advance
from kvlift.core.agreed import Request, agreed_at_start
from kvlift.core.ballot import Room, Verdict, from_wire, proofs, slots, to_wire
from kvlift.core.effect import Effect, SendWant, StartLookup
from kvlift.core.hear import hear
from kvlift.core.ids import Rid, Ticket
from kvlift.core.landed import Landed, LookupAnswered, PagesArrived, TokenArrived
from kvlift.core.local import Limits, Local, seen
from kvlift.core.policy import Policy, Switch
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.core.submission import Submission, Submit

PAGE = 2
HOST_PAGES = 16


def prompt_of(*pages: int, odd: int = 0) -> Prompt:
    """One page of two equal tokens for each number."""
    tokens = [t for page in pages for t in (page, page)] + [99] * odd
    return Prompt(bytes(32), token_bytes(tokens), PAGE)


def submit(rid: str, prompt: Prompt, priority: int = 0) -> Submit:
    return Submit(rid=Rid(rid), prompt=prompt, peer="prefill", priority=priority)


@define
class Ranks:
    """`started`: the effects of the last tick by rank. `heard`: reports for the next one."""

    policy: Policy
    n_ranks: int = 1
    limits: Limits = field(factory=Limits)
    states: list[State] = field(init=False)
    heard: list[list[Landed]] = field(init=False)
    started: list[list[Effect]] = field(init=False)
    decision: Decision | None = None
    n_stored: int = 0
    now_ns: int = 0
    verdict: Verdict | None = None

    def __attrs_post_init__(self) -> None:
        state = State(agreed=agreed_at_start(self.policy, Switch.ON), local=Local())
        self.states = [state] * self.n_ranks
        self.heard = [[] for _ in range(self.n_ranks)]
        self.started = [[] for _ in range(self.n_ranks)]

    def tell(self, *reports: Landed, rank: int | None = None) -> None:
        for number, box in enumerate(self.heard):
            if rank in (None, number):
                box.extend(reports)

    def tick(self, *calls: Submission) -> None:
        """One round of all ranks; every report of a rank is heard before its decision."""
        ballots = []
        for number, state in enumerate(self.states):
            local, starts = hear(state.local, self.limits, self.heard[number], self.now_ns)
            self.states[number] = State(agreed=state.agreed, local=local)
            self.started[number] = list(starts)
            self.heard[number] = []
            ballots.append(self._ballot(self.states[number]))
        least = tuple(min(numbers) for numbers in zip(*ballots, strict=True))
        for number, state in enumerate(self.states):
            self.verdict = from_wire(least, state.agreed, self.policy)
            outcome = self._advance(state, self.verdict, calls)
            self.decision = outcome.decision
            self.started[number] += outcome.starts
        digests = {state.agreed.digest for state in self.states}
        assert len(digests) == 1, "the ranks decided differently"

    def _advance(
        self, state: State, verdict: Verdict | None, calls: Iterable[Submission]
    ) -> Outcome:
        number = self.states.index(state)
        after, outcome = advance(
            state, verdict, calls, policy=self.policy, limits=self.limits, now_ns=self.now_ns
        )
        self.states[number] = after
        return outcome

    def _ballot(self, state: State) -> tuple[int, ...]:
        room = Room(device=self.policy.n_device_pages, host=self.policy.n_host_pages)
        return to_wire(
            proofs(state.agreed),
            self.policy,
            room=room,
            rates=state.local.rates,
            is_healthy=True,
            n_submissions=0,
            seen=seen(state.local, slots(state.agreed, self.policy)),
        )

    def answer(self) -> None:
        """Lookups find `n_stored` pages, the peer sends what was wanted, with the first token."""
        for number, effects in enumerate(self.started):
            for effect in effects:
                if isinstance(effect, StartLookup):
                    self.tell(LookupAnswered(effect.ticket, self.n_stored), rank=number)
                if isinstance(effect, SendWant):
                    n_pages = self.states[number].local.watches[effect.ticket].n_pages
                    self.tell(PagesArrived(effect.ticket, n_pages), rank=number)
                    if effect.token is not None:
                        self.tell(TokenArrived(effect.ticket, 5, -0.25), rank=number)

    def phase(self, rid: str) -> str:
        request = self.request(rid)
        return "gone" if request is None else type(request.phase).__name__

    def request(self, rid: str) -> Request | None:
        agreed = self.states[0].agreed
        attempt = agreed.attempt_by_rid.get(Rid(rid))
        return None if attempt is None else agreed.requests[attempt]

    def tickets(self, kind: type[Effect], rank: int = 0) -> list[Ticket]:
        """Of the effects of one kind that the last tick started."""
        return [
            e.ticket for e in self.started[rank] if isinstance(e, kind) and hasattr(e, "ticket")
        ]
