"""The host scheduler of a story: what it knows of a request, its page table and its answer."""

from collections.abc import Mapping

from attrs import define, field

from kvlift.core.prompt import n_pages_covering
from kvlift.testing.sim_memory import SimMemory
from kvlift.testing.story_prompts import StoryPrompt, n_answer_tokens


@define
class HostRequest:
    """One submission. `tables`: the physical device pages by rank, in order, while the host has it.

    `n_sampled` counts sampled tokens, the first one included; the last of them has no KV yet.
    """

    prompt: StoryPrompt
    tables: list[tuple[int, ...]]
    first_tokens: list[int | None]
    n_sampled: int = 0
    n_grown: int = 0
    is_seen: bool = False
    grow_outcome: str = "not asked"
    outcome: str | None = None
    reason: str = ""
    refusals: list[str] = field(factory=list)
    sources: Mapping[str, int] | None = None

    @property
    def n_tokens_with_kv(self) -> int:
        return self.prompt.prompt.n_tokens + max(0, self.n_sampled - 1)

    @property
    def n_pages_with_kv(self) -> int:
        return n_pages_covering(self.n_tokens_with_kv, self.prompt.prompt.page_tokens)

    def decode_to(self, n_sampled: int, memories: list[SimMemory]) -> None:
        """Decode until `n_sampled` tokens are sampled; their KV goes into the page table's pages.

        Raises `IndexError` where the table has no page for it.
        """
        n_before = self.n_tokens_with_kv
        self.n_sampled = max(self.n_sampled, n_sampled)
        if self.n_tokens_with_kv > n_before:
            for rank, memory in enumerate(memories):
                self.write_from(n_before, rank, memory)

    def write_from(self, token: int, rank: int, memory: SimMemory) -> None:
        """Compute the KV of all tokens from this one on, on one rank."""
        first = token // self.prompt.prompt.page_tokens
        for position in range(first, self.n_pages_with_kv):
            value = self.prompt.value(position, self.n_tokens_with_kv)
            memory.device[self.tables[rank][position]] = value

    def n_sampled_for(self, n_output_pages: int) -> int:
        """Tokens to sample so that this many pages behind the prompt's full ones are full."""
        prompt = self.prompt.prompt
        return max(self.n_sampled, n_answer_tokens(prompt, prompt.n_pages_full + n_output_pages))

    def n_pages_missing(self, n_sampled: int) -> int:
        """Pages that the page table is short of for this many sampled tokens."""
        prompt = self.prompt.prompt
        n_needed = n_pages_covering(prompt.n_tokens + n_sampled - 1, prompt.page_tokens)
        return max(0, n_needed - min(len(table) for table in self.tables))

    def n_sampled_in_table(self) -> int:
        """Tokens sampled when every page that was grown is full."""
        if not self.n_grown:
            return max(1, self.n_sampled)
        prompt = self.prompt.prompt
        n_slots = min(len(table) for table in self.tables) * prompt.page_tokens
        return max(self.n_sampled, n_slots - prompt.n_tokens + 1)

    def output(self) -> bytes:
        return self.prompt.tokens_after(self.n_sampled)

    def wrong_pages(self, rank: int, memory: SimMemory) -> list[int]:
        """Positions whose device page does not hold what the tokens say."""
        table = self.tables[rank]
        return [
            position
            for position in range(self.n_pages_with_kv)
            if position >= len(table)
            or memory.device[table[position]] != self.prompt.value(position, self.n_tokens_with_kv)
        ]

    def leave(self, rank: int) -> None:
        """The host has given the pages of one rank back."""
        self.tables[rank] = ()

    def leave_all(self) -> None:
        self.tables = [() for _ in self.tables]


@define
class HostRequests:
    """The latest submission of each request by name."""

    n_ranks: int
    by_name: dict[str, HostRequest] = field(factory=dict)

    def open(self, prompt: StoryPrompt) -> HostRequest:
        nobody: list[int | None] = [None] * self.n_ranks
        made = HostRequest(prompt, [() for _ in range(self.n_ranks)], nobody)
        self.by_name[prompt.name] = made
        return made
