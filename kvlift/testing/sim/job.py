"""What the host scheduler knows of one request: its page tables, its tokens, how it goes on."""

from enum import Enum

from attrs import define, field

from kvlift.core.prompt import n_pages_covering
from kvlift.testing.sim.workload import Order
from kvlift.testing.sim_memory import PageValue, SimMemory


class Stand(Enum):
    """Where the host is with a request."""

    ASKED = "asked"
    READY = "ready"
    STARTING = "starting"
    RUNNING = "running"
    GROWING = "growing"
    RETRACTING = "retracting"
    RETRACTED = "retracted"
    LEAVING = "leaving"
    WAITING = "waiting"
    OVER = "over"


@define(eq=False)
class Job:
    """`tables`: physical device pages by rank, in order, while the host has them.

    `n_sampled`: tokens sampled so far, the last of which has no KV yet. `asked_ns`: when it was
    last submitted; `started`: its place in the batch's order of age. WAITING: it is tried again.
    """

    order: Order
    node: str
    n_ranks: int
    stand: Stand = Stand.ASKED
    tables: list[list[int]] = field(init=False)
    n_sampled: int = 0
    asked_ns: int = 0
    started: int = 0
    n_tries: int = 1
    retry_ns: int = 0
    is_aborted: bool = False
    is_finished: bool = False
    n_ready: int = 0
    _full: list[PageValue] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.tables = [[] for _ in range(self.n_ranks)]

    @property
    def rid(self) -> str:
        return self.order.rid

    @property
    def page_tokens(self) -> int:
        return self.order.prompt.page_tokens

    @property
    def n_tokens_with_kv(self) -> int:
        return self.order.prompt.n_tokens + max(0, self.n_sampled - 1)

    @property
    def n_pages_with_kv(self) -> int:
        return n_pages_covering(self.n_tokens_with_kv, self.page_tokens)

    @property
    def has_pages(self) -> bool:
        return bool(self.tables[0])

    def output(self) -> bytes:
        return self.order.answer[: 4 * self.n_sampled]

    def value(self, position: int) -> PageValue:
        """What the page at this position must hold now; the same object while nothing changes."""
        page, prompt = self.page_tokens, self.order.prompt
        if (position + 1) * page > self.n_tokens_with_kv:
            text = prompt.tokens + self.order.answer
            return PageValue(prompt.namespace, text[: 4 * self.n_tokens_with_kv])
        if position >= len(self._full):
            text = prompt.tokens + self.order.answer
            for at in range(len(self._full), position + 1):
                self._full.append(PageValue(prompt.namespace, text[: 4 * page * (at + 1)]))
        return self._full[position]

    def has_room(self) -> bool:
        """Whether the KV of the last sampled token has a page."""
        n_needed = n_pages_covering(self.n_tokens_with_kv + 1, self.page_tokens)
        return len(self.tables[0]) >= n_needed

    def sample(self, memories: list[SimMemory]) -> None:
        """One decode step: the last token's KV is written, and a token is sampled after it."""
        self.n_sampled += 1
        self.write_from(self.n_tokens_with_kv - 1, memories)

    def write_from(self, token: int, memories: list[SimMemory]) -> None:
        """Compute the KV of all tokens from this one on."""
        for position in range(token // self.page_tokens, self.n_pages_with_kv):
            value = self.value(position)
            for table, memory in zip(self.tables, memories, strict=True):
                memory.device[table[position]] = value

    def give_pages_back(self) -> None:
        self.tables = [[] for _ in self.tables]
