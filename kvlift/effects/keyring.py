"""Page keys of prompts, computed once a prompt and away from the tick.

Hashing 65,536 tokens takes about a millisecond, so only worker threads ask here.
"""

import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from attrs import define, field

from kvlift.core.keys import page_keys
from kvlift.core.prompt import Prompt

N_PROMPTS_MAX = 1024


@define(eq=False)
class _Chain:
    """The keys of one prompt as far as somebody has asked for them."""

    prompt: "weakref.ref[Prompt]"
    n_pages_full: int
    rest: Iterator[bytes]
    keys: list[bytes] = field(factory=list)
    lock: threading.Lock = field(factory=threading.Lock)

    def up_to(self, n_pages: int) -> list[bytes]:
        with self.lock:
            while len(self.keys) < n_pages:
                self.keys.append(next(self.rest))
            if len(self.keys) == self.n_pages_full:
                self.rest = iter(())  # The generator holds the tokens; nothing is left to hash.
        return self.keys


class KeyRing:
    """Keys by prompt object, the `n_prompts_max` prompts used last. Safe for several threads.

    A prompt is known by identity, since comparing tokens would cost as much as it saves. The ring
    keeps the tokens alive only as long as their chain is not wholly computed.

    `shard`: what this rank's pages hold, where one scheduler names the prompts of many ranks and
    their namespace cannot say it. Every key depends on it.
    """

    def __init__(self, n_prompts_max: int = N_PROMPTS_MAX, *, shard: str = "") -> None:
        if n_prompts_max < 1:
            raise ValueError(f"a key ring holds at least 1 prompt, not {n_prompts_max}")
        self._n_prompts_max = n_prompts_max
        self._shard = shard.encode()
        self._chains: OrderedDict[int, _Chain] = OrderedDict()
        self._lock = threading.Lock()

    def keys(self, prompt: Prompt, positions: Sequence[int]) -> list[bytes]:
        """The keys (32 bytes each) of the full pages at `positions` of `prompt`, in that order.

        Raises IndexError for a position that is no full page: that page has no key.
        """
        if not positions:
            return []
        last = max(positions)
        if min(positions) < 0 or last >= prompt.n_pages_full:
            raise IndexError(
                f"pages {min(positions)}..{last} were asked for, the prompt has "
                f"{prompt.n_pages_full} full pages"
            )
        keys = self._chain(prompt).up_to(last + 1)
        return [keys[position] for position in positions]

    def _chain(self, prompt: Prompt) -> _Chain:
        name = id(prompt)
        with self._lock:
            chain = self._chains.get(name)
            # An id is given again after its object has died; the reference tells.
            if chain is None or chain.prompt() is not prompt:
                chain = _Chain(
                    weakref.ref(prompt),
                    prompt.n_pages_full,
                    page_keys(self._seed(prompt), prompt.tokens, prompt.page_tokens),
                )
                self._chains[name] = chain
            self._chains.move_to_end(name)
            while len(self._chains) > self._n_prompts_max:
                self._chains.popitem(last=False)
            return chain

    def _seed(self, prompt: Prompt) -> bytes:
        if not self._shard:
            return prompt.namespace
        return hashlib.sha256(b"kvlift shard 1\0" + prompt.namespace + self._shard).digest()
