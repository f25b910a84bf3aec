"""Namespaces and page keys: what makes two pages the same page.

A page's key is a SHA-256 chain over (parent key, tokens), seeded by the digest of a namespace.
The namespace holds everything that changes a page's bytes or says who may see them, so that pages
of two tenants, two adapters or two versions of the weights can never meet, in any tier.
"""

import hashlib
from collections.abc import Iterator

from attrs import field, frozen
from attrs.validators import ge

TOKEN_BYTES = 4
"""A token is a little-endian int32."""

KEY_BYTES = 32


@frozen(kw_only=True)
class Namespace:
    """Everything beside the tokens that decides what a page holds and who may read it.

    `shard` names the part of the model whose KV this rank keeps (for instance `tp0of2`), or
    `replicated` where all ranks hold equal bytes (MLA).
    """

    tenant: str = ""
    salt: str = ""
    lora: str = ""
    model: str = ""
    weights: str = ""
    dtype: str = ""
    layout: str = ""
    page_tokens: int = field(default=64, validator=ge(1))
    shard: str = ""

    def digest(self) -> bytes:
        """32 bytes; an injective encoding of the fields: each is tagged and carries its length."""
        named = (
            ("tenant", self.tenant),
            ("salt", self.salt),
            ("lora", self.lora),
            ("model", self.model),
            ("weights", self.weights),
            ("dtype", self.dtype),
            ("layout", self.layout),
            ("page_tokens", str(self.page_tokens)),
            ("shard", self.shard),
        )
        hasher = hashlib.sha256(b"kvlift namespace 1\0")
        for name, value in named:
            encoded = value.encode()
            hasher.update(b"%s=%d:" % (name.encode(), len(encoded)))
            hasher.update(encoded)
        return hasher.digest()


def page_keys(namespace_digest: bytes, tokens: bytes, page_tokens: int) -> Iterator[bytes]:
    """The key of each full page of `tokens` (little-endian int32), first page first."""
    page_bytes = page_tokens * TOKEN_BYTES
    view = memoryview(tokens)
    key = namespace_digest
    for start in range(0, len(view) - page_bytes + 1, page_bytes):
        hasher = hashlib.sha256(key)
        hasher.update(view[start : start + page_bytes])
        key = hasher.digest()
        yield key
