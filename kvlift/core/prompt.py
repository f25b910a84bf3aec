"""A request's tokens, and the two roundings from tokens to pages. There is no third one."""

import struct
from collections.abc import Sequence

from attrs import field, frozen

from kvlift.core.keys import KEY_BYTES, TOKEN_BYTES


def n_pages_filled(n_tokens: int, page_tokens: int) -> int:
    """Pages that `n_tokens` fill to the last token: rounds down."""
    return n_tokens // page_tokens


def n_pages_covering(n_tokens: int, page_tokens: int) -> int:
    """Pages that `n_tokens` need room in: rounds up."""
    return -(-n_tokens // page_tokens)


@frozen(repr=False)
class Prompt:
    """Tokens in a namespace: `tokens` is one contiguous buffer of little-endian int32.

    The repr shows neither tokens nor namespace: they are the user's.
    """

    namespace: bytes = field()
    tokens: bytes
    page_tokens: int

    @namespace.validator
    def _is_a_digest(self, _attribute: object, value: bytes) -> None:
        if len(value) != KEY_BYTES:
            raise ValueError(f"a namespace digest has {KEY_BYTES} bytes, this has {len(value)}")

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def n_pages_full(self) -> int:
        return n_pages_filled(self.n_tokens, self.page_tokens)

    @property
    def n_pages(self) -> int:
        return n_pages_covering(self.n_tokens, self.page_tokens)

    def page_bytes(self) -> int:
        """Bytes of the tokens of one page (not of its KV)."""
        return self.page_tokens * TOKEN_BYTES

    def with_tokens(self, more: bytes) -> "Prompt":
        return Prompt(self.namespace, self.tokens + more, self.page_tokens)

    def first_tokens(self, n_tokens: int) -> "Prompt":
        return Prompt(self.namespace, self.tokens[: n_tokens * TOKEN_BYTES], self.page_tokens)

    def last_tokens(self, n_tokens: int) -> bytes:
        return self.tokens[len(self.tokens) - n_tokens * TOKEN_BYTES :]

    def __repr__(self) -> str:
        return f"Prompt(n_tokens={self.n_tokens}, page_tokens={self.page_tokens})"


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as the contiguous int32 buffer that `Prompt` holds."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)
