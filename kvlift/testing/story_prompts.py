"""The prompts of a story: endless token streams, cut into prompts and answers.

A prompt's tokens are the beginning of its stream and what is decoded is the rest, so that
`prompt B from=A[0:6]` is A's prompt followed by A's answer where A has fewer than six pages.
"""

from hashlib import sha256

from attrs import define, evolve, field, frozen

from kvlift.core.keys import Namespace
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.testing.sim_memory import PageValue
from kvlift.testing.story_lines import Pages, PromptLine

TOKEN_MASK = 0x7FFF_FFFF


@frozen
class Stream:
    """An endless, deterministic sequence of tokens; its first `n_parent` are another stream's."""

    name: str
    parent: "Stream | None" = None
    n_parent: int = 0

    def token_at(self, place: int) -> int:
        if self.parent is not None and place < self.n_parent:
            return self.parent.token_at(place)
        digest = sha256(f"{self.name}:{place}".encode()).digest()
        return int.from_bytes(digest[:4], "little") & TOKEN_MASK

    def tokens(self, start: int, stop: int) -> bytes:
        """The tokens [start, stop) as little-endian int32."""
        return token_bytes([self.token_at(place) for place in range(start, stop)])


@frozen
class StoryPrompt:
    """A named prompt. `value` is what a page of its stream holds, answer included."""

    name: str
    stream: Stream
    namespace: Namespace
    prompt: Prompt

    def tokens_after(self, n_tokens: int) -> bytes:
        """The first `n_tokens` of its answer."""
        return self.stream.tokens(self.prompt.n_tokens, self.prompt.n_tokens + n_tokens)

    def value(self, position: int, n_tokens: int | None = None) -> PageValue:
        """What the page at `position` holds when `n_tokens` (None: enough) have their KV."""
        stop = (position + 1) * self.prompt.page_tokens
        stop = stop if n_tokens is None else min(stop, n_tokens)
        return PageValue(self.prompt.namespace, self.stream.tokens(0, stop))

    def cut(self, n_pages: int) -> Prompt:
        """The first `n_pages` full pages of its stream as a prompt."""
        n_tokens = n_pages * self.prompt.page_tokens
        return Prompt(
            self.prompt.namespace, self.stream.tokens(0, n_tokens), self.prompt.page_tokens
        )

    def is_mine(self, value: PageValue) -> bool:
        """Whether a page with this value can be one of this prompt or of its answer."""
        n_tokens = len(value.tokens) // 4
        return (
            value.namespace == self.prompt.namespace
            and self.stream.tokens(0, n_tokens) == value.tokens
        )

    def places(self, pages: Pages) -> range:
        stop = self.prompt.n_pages_full if pages.stop is None else pages.stop
        return range(pages.start, stop)


@define
class Prompts:
    """The prompts that a story has named so far."""

    page_tokens: int
    by_name: dict[str, StoryPrompt] = field(factory=dict)

    def add(self, line: PromptLine) -> StoryPrompt:
        """Raises `ValueError` where `pages=` and `tokens=` contradict each other."""
        parent = self.by_name[line.like] if line.like else None
        n_tokens = parent.prompt.n_tokens if parent else 0
        n_shared_tokens = n_tokens
        if line.begins is not None:
            parent = self.by_name[line.begins.name]
            n_shared_tokens = parent.places(line.begins).stop * self.page_tokens
        if line.n_pages is not None or line.n_tokens is not None:
            n_tokens = _n_tokens(line, self.page_tokens)
        stream = Stream(line.name, parent.stream if parent else None, n_shared_tokens)
        if parent is not None and (line.like or n_tokens <= n_shared_tokens):
            stream = parent.stream
        base = parent.namespace if parent else Namespace(page_tokens=self.page_tokens)
        said = dict(line.namespace)
        namespace = evolve(
            base,
            tenant=said.get("tenant", base.tenant),
            lora=said.get("lora", base.lora),
            salt=said.get("salt", base.salt),
        )
        prompt = Prompt(namespace.digest(), stream.tokens(0, n_tokens), self.page_tokens)
        made = StoryPrompt(line.name, stream, namespace, prompt)
        self.by_name[line.name] = made
        return made


def _n_tokens(line: PromptLine, page_tokens: int) -> int:
    if line.n_tokens is None:
        return (line.n_pages or 0) * page_tokens
    if line.n_pages is not None and line.n_tokens // page_tokens != line.n_pages:
        raise ValueError(
            f"{line.n_tokens} tokens are {line.n_tokens // page_tokens} full pages of"
            f" {page_tokens} tokens, not {line.n_pages}"
        )
    return line.n_tokens


def n_answer_tokens(prompt: Prompt, n_pages_full: int) -> int:
    """Sampled tokens after which `n_pages_full` pages are full: the last one has no KV yet."""
    return max(1, n_pages_full * prompt.page_tokens - prompt.n_tokens + 1)
