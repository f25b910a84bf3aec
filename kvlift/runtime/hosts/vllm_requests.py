"""What kvlift knows of a request of vLLM: its namespace, its tokens as bytes, what went down."""

import array
import sys

from attrs import define, field, frozen

from kvlift.core.keys import TOKEN_BYTES, Namespace
from kvlift.core.prompt import Prompt
from kvlift.runtime.hosts.vllm_words import EngineRequest


@frozen(kw_only=True)
class ModelWords:
    """What every key of this engine says about its model."""

    model: str
    weights: str
    dtype: str
    page_tokens: int
    n_ranks: int

    def namespace(self, request: EngineRequest) -> bytes:
        """The digest of what decides a request's KV, and of who may see it. The workers add what
        is theirs: the rank, and how a block lies in memory."""
        lora = getattr(request, "lora_request", None)
        return Namespace(
            salt=request.cache_salt or "",
            lora="" if lora is None else f"{lora.lora_name}\0{lora.lora_int_id}\0{lora.lora_path}",
            model=self.model,
            weights=self.weights,
            dtype=self.dtype,
            layout="vllm",
            page_tokens=self.page_tokens,
            shard=f"tp{self.n_ranks}",
        ).digest()


@define(eq=False)
class Tracked:
    """One living request. `n_stowed`: full pages that are on their way down, or below. `n_short`:
    its loads that came short. `nothing_behind`: given pages behind which nothing was found."""

    request: EngineRequest
    namespace: bytes
    n_prompt: int
    peer: str
    n_stowed: int = 0
    n_short: int = 0
    nothing_behind: int = -1
    _tokens: bytearray = field(factory=bytearray, repr=False)

    def prompt(self, n_tokens: int, page_tokens: int) -> Prompt:
        """The first `n_tokens` tokens; only what is new since the last call is converted."""
        n_known = len(self._tokens) // TOKEN_BYTES
        if n_known < n_tokens:
            fresh = array.array("i", self.request.all_token_ids[n_known:n_tokens])
            if sys.byteorder == "big":
                fresh.byteswap()
            self._tokens += fresh.tobytes()
        return Prompt(self.namespace, bytes(self._tokens[: n_tokens * TOKEN_BYTES]), page_tokens)


def is_cacheable(request: EngineRequest) -> bool:
    """Whether tokens and namespace alone decide the KV, and tokens only ever follow."""
    return not (
        getattr(request, "mm_features", None)
        or getattr(request, "prompt_embeds", None) is not None
        or getattr(request, "resumable", False)
        or getattr(request, "prompt_token_ids", ()) is None
    )
