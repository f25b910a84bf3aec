"""References to vLLM's blocks: held for as long as something of kvlift reads or writes them."""

from collections import Counter
from collections.abc import Sequence

from attrs import define, field

from kvlift.runtime.hosts.vllm_words import BlockCache, BlockPool


@define(eq=False)
class HeldBlocks:
    """One reference in vLLM's own pool for each time that a block is held."""

    _cache: BlockCache | None = field(default=None, init=False)
    _held: Counter[int] = field(factory=Counter, init=False)

    def bind(self, cache: BlockCache) -> None:
        self._cache = cache

    def of_request(self, rid: str) -> tuple[int, ...]:
        """The blocks of a living request, in order of position."""
        (blocks,) = self._bound().get_block_ids(rid)
        return tuple(blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        pool = self._pool()
        self._held.update(blocks)
        for block in blocks:  # one by one: the same block may be lent twice
            pool.touch([pool.blocks[block]])

    def release(self, blocks: Sequence[int]) -> None:
        pool = self._pool()
        self._held.subtract(blocks)
        for block in blocks:
            if not self._held[block]:
                del self._held[block]
        # vLLM frees from the end, so that a prefix outlives what hangs on it.
        pool.free_blocks([pool.blocks[block] for block in reversed(blocks)])

    def has_pending_frees(self) -> bool:
        """Some block is free as soon as it is released here, which happens by itself."""
        if not self._held:
            return False
        blocks = self._pool().blocks
        return any(blocks[block].ref_cnt == n for block, n in self._held.items())

    def __len__(self) -> int:
        return len(self._held)

    def _bound(self) -> BlockCache:
        assert self._cache is not None, "vLLM binds its cache before the first request"
        return self._cache

    def _pool(self) -> BlockPool:
        return self._bound().block_pool
