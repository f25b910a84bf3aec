"""The requests of a run: prompts that share beginnings, tenants, priorities, answers.

A request's answer is fixed before it is submitted, so that what a page must hold never depends on
what the runtime did; and who comes next never depends on how earlier requests ended.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Final, Protocol

from attrs import define, field, frozen

from kvlift.core.keys import Namespace
from kvlift.core.prompt import Prompt, n_pages_covering, token_bytes
from kvlift.runtime.demo.trace import BLOCK_TOKENS, TraceRequest, read_trace
from kvlift.testing.sim.plan import NS_PER_MS, Plan

TOKEN_MAX: Final = (1 << 31) - 1
N_REMEMBERED: Final = 80
TRACE_WINDOW: Final = 64
"""Requests of a trace that one seed plays; other seeds begin elsewhere in it."""

TRACE_SPEEDUP: Final = 100
TRACE_BLOCKS_MAX: Final = 48
"""Longer prompts of a trace are cut here; their beginnings, which are what is shared, stay."""


@frozen(kw_only=True)
class Order:
    """One request before it is submitted. `answer`: all tokens that decoding will sample."""

    rid: str
    prompt: Prompt
    answer: bytes
    priority: int = 0
    n_pages_output: int = 0
    gap_ns: int = 0

    @property
    def n_answer(self) -> int:
        return len(self.answer) // 4


class Author(Protocol):
    """Where requests come from, one after the other; None: no more.

    `warm`: what storage holds from an earlier life of the worker."""

    warm: list[Prompt]

    def next_order(self) -> Order | None: ...


def tokens_of(name: str, start: int, stop: int) -> bytes:
    """Tokens [start, stop) of an endless stream that depends on its name alone."""
    numbers = []
    for place in range(start, stop):
        digest = sha256(f"{name}:{place}".encode()).digest()
        numbers.append(int.from_bytes(digest[:4], "little") & TOKEN_MAX)
    return token_bytes(numbers)


def namespaces(plan: Plan) -> list[bytes]:
    page_tokens = plan.config.page_tokens
    return [
        Namespace(tenant=f"tenant-{n}", page_tokens=page_tokens).digest()
        for n in range(plan.n_tenants)
    ]


@define(eq=False)
class DrawnAuthor:
    """Conversations: a new one, the next turn of one, or one that shares a beginning."""

    plan: Plan
    n_left: int
    draw: Random = field(init=False)
    warm: list[Prompt] = field(factory=list)
    n_written: int = 0
    _earlier: list[tuple[int, bytes]] = field(factory=list)
    _namespaces: list[bytes] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.draw = Random(f"{self.plan.seed}/workload")
        self._namespaces = namespaces(self.plan)
        page = self.plan.config.page_tokens
        for number in range(self.plan.n_warm):
            tenant = self.draw.randrange(self.plan.n_tenants)
            n_tokens = page * self.draw.randint(1, self.plan.n_prompt_pages_max)
            tokens = tokens_of(f"{self.plan.seed}/warm/{number}", 0, n_tokens)
            self._earlier.append((tenant, tokens))
            self.warm.append(Prompt(self._namespaces[tenant], tokens, page))

    def next_order(self) -> Order | None:
        if self.n_left == 0:
            return None
        self.n_left -= 1
        self.n_written += 1
        plan, draw, page = self.plan, self.draw, self.plan.config.page_tokens
        rid = f"r{self.n_written}"
        tenant = draw.randrange(plan.n_tenants)
        tokens = self._beginning(tenant)
        n_most = plan.n_prompt_pages_max * page
        n_new = draw.choice((1, page, draw.randint(1, 1 + n_most // 2), draw.randint(1, n_most)))
        tokens = tokens[: 4 * n_most]
        n_begun = len(tokens) // 4
        n_tokens = max(1, n_begun) if n_begun >= n_most else min(n_most, n_begun + n_new)
        tokens += tokens_of(f"{plan.seed}/{rid}", n_begun, n_tokens)
        n_answer = draw.randint(1, max(1, plan.n_output_pages_max * page))
        answer = tokens_of(f"{plan.seed}/{rid}", n_tokens, n_tokens + n_answer)
        self._earlier = [*self._earlier[-N_REMEMBERED + 1 :], (tenant, tokens + answer)]
        n_pages = n_pages_covering(n_tokens + n_answer - 1, page) - n_pages_covering(n_tokens, page)
        return Order(
            rid=rid,
            prompt=Prompt(self._namespaces[tenant], tokens, page),
            answer=answer,
            priority=draw.choice((0, 0, 0, 1)),
            n_pages_output=n_pages if plan.declares_output else 0,
            gap_ns=0 if draw.random() < 0.3 else int(draw.expovariate(1 / plan.gap_ns)),
        )

    def _beginning(self, tenant: int) -> bytes:
        """Tokens that came before: a whole turn, a part of one, or another tenant's."""
        draw, page_bytes = self.draw, self.plan.config.page_tokens * 4
        kind = draw.random()
        mine = [tokens for owner, tokens in self._earlier if owner == tenant]
        if kind < 0.2 and self.plan.n_tenants > 1:
            mine = [tokens for _owner, tokens in self._earlier]
        if not mine or kind > 0.8:
            return b""
        before = draw.choice(mine)
        if kind < 0.5:
            return before
        return before[: page_bytes * draw.randint(0, len(before) // page_bytes)]


@define(eq=False)
class TraceAuthor:
    """A window of a trace: one block of it is one page here, equal blocks are equal tokens."""

    plan: Plan
    requests: Sequence[TraceRequest]
    warm: list[Prompt] = field(factory=list)
    _orders: Iterator[Order] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._orders = self._written()

    def next_order(self) -> Order | None:
        return next(self._orders, None)

    def _written(self) -> Iterator[Order]:
        plan, page = self.plan, self.plan.config.page_tokens
        namespace = namespaces(plan)[0]
        before_ms = self.requests[0].timestamp if self.requests else 0
        for number, request in enumerate(self.requests, 1):
            blocks = request.hash_ids[:TRACE_BLOCKS_MAX]
            tokens = b"".join(tokens_of(f"block/{block}", 0, page) for block in blocks)
            n_answer = max(1, round(request.output_length * page / BLOCK_TOKENS))
            n_answer = min(n_answer, page)
            rid = f"t{number}"
            gap_ns = (request.timestamp - before_ms) * NS_PER_MS // TRACE_SPEEDUP
            before_ms = request.timestamp
            answer = tokens_of(f"{plan.seed}/{rid}", 0, n_answer)
            prompt = Prompt(namespace, tokens, page)
            yield Order(rid=rid, prompt=prompt, answer=answer, gap_ns=gap_ns)


def trace_window(path: str, seed: int) -> list[TraceRequest]:
    """The requests that one seed plays. Raises `TraceError`."""
    requests = read_trace(Path(path), 100 * TRACE_WINDOW)
    start = seed * TRACE_WINDOW % len(requests)
    return requests[start : start + TRACE_WINDOW]


def pages_of_trace(requests: Sequence[TraceRequest]) -> int:
    """Device pages that the longest of these requests needs, its answer included."""
    most = max(len(request.hash_ids) for request in requests)
    return min(TRACE_BLOCKS_MAX, most) + 1
