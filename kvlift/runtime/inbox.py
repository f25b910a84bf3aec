"""The host's calls on their way to the next tick: checked at once, taken in order.

Thread-safe: `submit` and `abort` come from anywhere."""

import threading
from collections import deque
from typing import Final

from kvlift.core.ids import Rid
from kvlift.core.keys import TOKEN_BYTES
from kvlift.core.policy import Switch
from kvlift.core.prompt import Prompt
from kvlift.core.submission import Abort, Finish, Retract, Submission, Submit
from kvlift.effects.wakeup import Wakeup
from kvlift.runtime.config import Config
from kvlift.runtime.errors import (
    DuplicateRequest,
    PromptTooLong,
    TooManyRequests,
    UnknownRequest,
)

PRIORITY_MIN: Final = -(1 << 63)
PRIORITY_MAX: Final = (1 << 63) - 1


class Inbox:
    """`n_taken` and `n_known` count calls since the start, taken and given."""

    def __init__(self, config: Config, wakeup: Wakeup) -> None:
        self._config = config
        self._wakeup = wakeup
        self._calls: deque[Submission] = deque()
        self._alive: set[str] = set()
        self._lock = threading.Lock()
        self._n_taken = 0

    def reconfigure(self, config: Config) -> None:
        """`requests_max`; who is there beyond it stays."""
        self._config = config

    def submit(
        self,
        rid: str,
        prompt: Prompt,
        *,
        peer: str,
        priority: int,
        n_pages_output: int,
        n_pages_given: int = 0,
    ) -> None:
        """Raises a `RequestError` or `ValueError` where the request can't be; nothing is kept."""
        _check_words(rid, peer)
        if not PRIORITY_MIN <= priority <= PRIORITY_MAX:
            raise ValueError(f"a priority is a signed 64-bit number, not {priority}")
        self._check(rid, prompt, n_pages_output, n_pages_given)
        with self._lock:
            if rid in self._alive:
                raise DuplicateRequest(rid)
            if len(self._alive) >= self._config.requests_max:
                raise TooManyRequests(self._config.requests_max)
            self._alive.add(rid)
            self._calls.append(
                Submit(
                    rid=Rid(rid),
                    prompt=prompt,
                    peer=peer,
                    priority=priority,
                    n_pages_output=n_pages_output,
                    n_pages_given=n_pages_given,
                )
            )
        self._wakeup.ring()

    def _check(self, rid: str, prompt: Prompt, n_pages_output: int, n_pages_given: int) -> None:
        if n_pages_output < 0:
            raise ValueError(f"an output has 0 pages or more, not {n_pages_output}")
        _check_tokens("prompt", prompt.tokens)
        if prompt.page_tokens != self._config.page_tokens:
            raise ValueError(
                f"the prompt's pages have {prompt.page_tokens} tokens, "
                f"the cache's {self._config.page_tokens}"
            )
        n_pages = prompt.n_pages + n_pages_output
        if n_pages > self._config.device_pages:
            raise PromptTooLong(rid, n_pages, self._config.device_pages)
        if not 0 <= n_pages_given <= prompt.n_pages_full:
            raise ValueError(f"{n_pages_given} full pages given of {prompt.n_pages_full}")
        if n_pages_given and self._config.device_tier is Switch.ON:
            raise ValueError("pages are given only by a host that owns them: device_tier=off")
        if prompt.n_tokens == 0:
            raise ValueError(f"request {rid!r} has an empty prompt")

    def call(self, rid: str, name: str, call: Submission) -> None:
        """A call about a living request. Raises `UnknownRequest`, and `ValueError` for an output
        that is no buffer of tokens."""
        if isinstance(call, Finish | Retract):
            _check_tokens("output", call.output)
        with self._lock:
            if rid not in self._alive:
                raise UnknownRequest(rid, name)
            self._calls.append(call)
        self._wakeup.ring()

    def is_leaving(self, rid: str) -> bool:
        """A call is under way after which the request is not the scheduler's any more."""
        with self._lock:
            return any(
                isinstance(call, Abort | Finish | Retract) and call.rid == rid
                for call in self._calls
            )

    def append(self, call: Submission) -> None:
        """A call about the cache as a whole."""
        with self._lock:
            self._calls.append(call)
        self._wakeup.ring()

    def take(self, n_known_to_all: int | None = None) -> tuple[Submission, ...]:
        """Everything so far, or only what every rank is known to have been given."""
        with self._lock:
            n_calls = len(self._calls)
            if n_known_to_all is not None:
                n_calls = max(0, min(n_calls, n_known_to_all - self._n_taken))
            self._n_taken += n_calls
            return tuple(self._calls.popleft() for _ in range(n_calls))

    def is_alive(self, rid: str) -> bool:
        with self._lock:
            return rid in self._alive

    def has_calls(self) -> bool:
        with self._lock:
            return bool(self._calls)

    def n_known(self) -> int:
        with self._lock:
            return self._n_taken + len(self._calls)

    def has_ended(self, rid: str) -> None:
        """The id is free again."""
        with self._lock:
            self._alive.discard(rid)


def _check_tokens(name: str, tokens: object) -> None:
    """What is given as a list of numbers would be found out in the middle of a tick only."""
    if not isinstance(tokens, bytes) or len(tokens) % TOKEN_BYTES:
        raise ValueError(f"the {name} is no buffer of tokens: make it with token_bytes([...])")


def _check_words(*words: str) -> None:
    """Half a character (a lone surrogate) can be digested, written or sent by nobody."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{ascii(word)[:200]} is not valid Unicode") from None
