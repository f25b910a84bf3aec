"""Computing prompts: in chunks, page by page, with a prefix cache of its own.

KV is kept with all heads, because decode ranks with other shards may ask for the same page.
"""

from collections import OrderedDict
from typing import Final

import torch
from attrs import define, field, frozen

from kvlift.core.keys import page_keys
from kvlift.core.prompt import Prompt
from kvlift.runtime.worker.generation import Sampling
from kvlift.runtime.worker.model import Decoder, PagedKv, paged_batch
from kvlift.runtime.worker.sampling import sample

GREEDY: Final = Sampling(temperature=0.0)


@frozen
class FirstToken:
    """The greedy token after the prompt, and the natural logarithm of its probability."""

    token: int
    logprob: float


@define(eq=False)
class PrefillRun:
    """One prompt under way. `kv` is [layers, 2, n_pages * page_tokens, kv_heads, dim]."""

    prompt: Prompt
    token_ids: list[int]
    kv: torch.Tensor
    keys: tuple[bytes, ...]
    n_reused: int = 0
    n_computed: int = 0
    first: FirstToken | None = None

    @property
    def is_done(self) -> bool:
        return self.first is not None

    @property
    def n_pages_done(self) -> int:
        """Leading pages whose bytes are final; the page of odd tokens counts at the end."""
        if self.is_done:
            return self.prompt.n_pages
        return self.n_computed // self.prompt.page_tokens

    def page_bytes(self, page: int, *, rank: int, n_ranks: int) -> bytes:
        """A page as rank `rank` of `n_ranks` keeps it: [layer][K|V][token][kv_head][dim].

        Raises `IndexError` for a page that is not computed yet.
        """
        if not 0 <= page < self.n_pages_done:
            raise IndexError(f"page {page} is not computed; {self.n_pages_done} pages are")
        span = self.prompt.page_tokens
        n_heads = self.kv.shape[3] // n_ranks
        heads = slice(rank * n_heads, (rank + 1) * n_heads)
        part = self.kv[:, :, page * span : (page + 1) * span, heads].contiguous()
        return bytes(part.view(torch.uint8).cpu().numpy().tobytes())


@define(eq=False)
class PrefillEngine:
    """Computes prompts with a whole (unsharded) decoder.

    `n_cached_pages_max` bounds the prefix cache, which drops what was used least recently.
    Without `keeps_apart` namespaces do not separate its pages: for a decode worker that has one
    only, and names it anew for each request to reuse nothing.
    """

    decoder: Decoder
    page_tokens: int
    n_cached_pages_max: int = 4096
    chunk_tokens: int = 512
    keeps_apart: bool = True
    _cache: OrderedDict[bytes, torch.Tensor] = field(factory=OrderedDict, init=False)

    @property
    def n_cached_pages(self) -> int:
        return len(self._cache)

    def start(self, prompt: Prompt) -> PrefillRun:
        """Take over the longest prefix that is cached; at least one token is left to compute.

        Raises `ValueError` for a prompt that this engine cannot compute.
        """
        if prompt.page_tokens != self.page_tokens:
            raise ValueError(
                f"this prefill node has pages of {self.page_tokens} tokens, the request's have "
                f"{prompt.page_tokens}; start both with the same page size"
            )
        if prompt.n_tokens == 0:
            raise ValueError("a prompt needs at least one token")
        config = self.decoder.config
        if prompt.n_tokens > config.positions_max:
            raise ValueError(
                f"the prompt has {prompt.n_tokens} tokens, the model takes {config.positions_max}"
            )
        token_ids = memoryview(prompt.tokens).cast("i").tolist()
        if max(token_ids) >= config.vocab or min(token_ids) < 0:
            raise ValueError(f"a token id is outside the vocabulary of {config.vocab}")
        kv = torch.zeros(
            (
                config.n_layers,
                2,
                prompt.n_pages * self.page_tokens,
                config.n_kv_heads,
                config.head_dim,
            ),
            dtype=getattr(torch, config.dtype),
            device=self.decoder.device,
        )
        namespace = prompt.namespace if self.keeps_apart else b""
        keys = tuple(page_keys(namespace, prompt.tokens, self.page_tokens))
        run = PrefillRun(prompt, token_ids, kv, keys)
        self._take_prefix(run)
        return run

    def step(self, run: PrefillRun) -> None:
        """Compute one chunk; the last one yields the first token."""
        if run.is_done:
            return
        start = run.n_computed
        stop = min(start + self.chunk_tokens, len(run.token_ids))
        table = range(-(-stop // self.page_tokens))
        batch = paged_batch(
            [(run.token_ids[start:stop], start, table)],
            page_tokens=self.page_tokens,
            n_written_first=[start],
            device=self.decoder.device,
        )
        layers = tuple((layer[0], layer[1]) for layer in run.kv)
        hidden = self.decoder.paged_forward(batch, PagedKv(self.page_tokens, layers))
        run.n_computed = stop
        if stop == len(run.token_ids):
            logits = self.decoder.logits(hidden[0, -1])
            run.first = FirstToken(*sample(logits, GREEDY, stop))
        self._keep_pages(run, start)

    def forget_all(self) -> None:
        """Empty the prefix cache."""
        self._cache.clear()

    def _take_prefix(self, run: PrefillRun) -> None:
        n_usable = (len(run.token_ids) - 1) // self.page_tokens
        for page, key in enumerate(run.keys[:n_usable]):
            kept = self._cache.get(key)
            if kept is None:
                break
            self._cache.move_to_end(key)
            run.kv[:, :, page * self.page_tokens : (page + 1) * self.page_tokens] = kept
            run.n_reused += self.page_tokens
        run.n_computed = run.n_reused

    def _keep_pages(self, run: PrefillRun, start: int) -> None:
        span = self.page_tokens
        for page in range(start // span, min(run.n_computed // span, len(run.keys))):
            key = run.keys[page]
            if self.n_cached_pages_max and key not in self._cache:
                self._cache[key] = run.kv[:, :, page * span : (page + 1) * span].clone()
        while len(self._cache) > self.n_cached_pages_max:
            self._cache.popitem(last=False)
