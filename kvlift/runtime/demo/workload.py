"""What is played: turns of conversations, or requests of a trace, and how much memory they ask for.

A workload is a list of acts. The turns of an act run side by side; the next act begins when all of
them are answered and everything that goes down has arrived.
"""

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Final

from attrs import frozen

from kvlift.core.keys import page_keys
from kvlift.core.prompt import n_pages_covering, token_bytes

PAGE_TOKENS: Final = 16
SYSTEM_TOKENS: Final = 48
FIRST_TURN_TOKENS: Final = 208
NEXT_TURN_TOKENS: Final = 96
ANSWER_TOKENS: Final = 24
STAGGER_S: Final = 0.1
DEVICE_PERCENT: Final = 60
"""The device's share of the working set: less than all of it, so that the host has a part."""

PAGES_MAX: Final = 1 << 20


class DemoRefused(ValueError):
    """This cannot be played; the message says what to change."""


@frozen(kw_only=True)
class Turn:
    """One request. `conversation`: the one whose history comes before `new_tokens`, if any.

    `round_number` counts from 1 and is what results are grouped by; `delay_s` is from the start of
    the act.
    """

    name: str
    round_number: int
    new_tokens: tuple[int, ...]
    n_output: int
    conversation: int | None = None
    delay_s: float = 0.0


@frozen(kw_only=True)
class Sizes:
    """Pages of the two upper tiers, and the longest request, all per rank."""

    device_pages: int
    host_pages: int
    request_tokens_most: int


@frozen(kw_only=True)
class Workload:
    """`flush_before`: the act before which device and host forget everything."""

    what: str
    page_tokens: int
    acts: tuple[tuple[Turn, ...], ...]
    flush_before: int

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(itertools.chain.from_iterable(self.acts))

    @property
    def n_rounds(self) -> int:
        return max(turn.round_number for turn in self.turns)

    @property
    def rounds_after_flush(self) -> frozenset[int]:
        later = itertools.chain.from_iterable(self.acts[self.flush_before :])
        return frozenset(turn.round_number for turn in later)

    def lengths(self) -> Iterator[tuple[Turn, int]]:
        """Every turn with the tokens of its prompt, history included, and its answer."""
        history: dict[int, int] = {}
        for turn in self.turns:
            n_tokens = len(turn.new_tokens) + turn.n_output
            if turn.conversation is not None:
                n_tokens += history.get(turn.conversation, 0)
                history[turn.conversation] = n_tokens
            yield turn, n_tokens

    def sizes(self) -> Sizes:
        """Raises `DemoRefused` where it would be absurd."""
        n_most = max(n_tokens for _, n_tokens in self.lengths())
        n_working = self._working_set_pages()
        if n_working > PAGES_MAX:
            raise DemoRefused(
                f"this workload has {n_working} different pages, the demo takes {PAGES_MAX}; "
                "play fewer requests or scale them down"
            )
        # Room for growth beside the longest request, however small the share.
        n_least = n_pages_covering(n_most, self.page_tokens) + 16
        return Sizes(
            device_pages=max(n_least, n_working * DEVICE_PERCENT // 100),
            host_pages=2 * n_working + n_least,
            request_tokens_most=n_most,
        )

    def _working_set_pages(self) -> int:
        """Pages of everything that is ever computed, shared prefixes of a trace once."""
        conversations: dict[int, int] = {}
        keys: set[bytes] = set()
        n_single = 0
        for turn, n_tokens in self.lengths():
            n_pages = n_pages_covering(n_tokens, self.page_tokens)
            if turn.conversation is not None:
                conversations[turn.conversation] = n_pages
                continue
            shared = list(page_keys(b"", token_bytes(turn.new_tokens), self.page_tokens))
            n_single += n_pages - len(shared)
            keys.update(shared)
        return sum(conversations.values()) + len(keys) + n_single


def drawn(seed: str, n_tokens: int, vocab: int) -> tuple[int, ...]:
    """Tokens that depend on the seed's text alone."""
    draw = random.Random(seed)
    return tuple(draw.randrange(vocab) for _ in range(n_tokens))


def conversations(*, n_conversations: int, n_rounds: int, vocab: int, seed: int) -> Workload:
    """Users who begin with the same instructions and take turns, all of them in every round."""
    system = drawn(f"{seed}/system", SYSTEM_TOKENS, vocab)

    def turn(conversation: int, number: int) -> Turn:
        n_tokens = FIRST_TURN_TOKENS if number == 1 else NEXT_TURN_TOKENS
        new_tokens = drawn(f"{seed}/{conversation}/{number}", n_tokens, vocab)
        return Turn(
            name=f"conversation {conversation + 1}, round {number}",
            round_number=number,
            new_tokens=(*system, *new_tokens) if number == 1 else new_tokens,
            n_output=ANSWER_TOKENS,
            conversation=conversation,
            delay_s=conversation * STAGGER_S,
        )

    acts = tuple(
        tuple(turn(conversation, number) for conversation in range(n_conversations))
        for number in range(1, n_rounds + 1)
    )
    return Workload(
        what=f"{n_conversations} conversations of {n_rounds} rounds",
        page_tokens=PAGE_TOKENS,
        acts=acts,
        flush_before=n_rounds // 2,
    )


def prompt_of(turn: Turn, histories: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    """The whole prompt, given what each conversation has said so far."""
    if turn.conversation is None:
        return turn.new_tokens
    return (*histories.get(turn.conversation, ()), *turn.new_tokens)
