"""What kvlift reads of vLLM's objects, as protocols: vLLM itself is imported in `vllm.py` alone.

Names and meanings are those of vLLM 0.32 and 0.33.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol


class LoraRequest(Protocol):
    lora_name: str
    lora_int_id: int
    lora_path: str


class EngineRequest(Protocol):
    """`vllm.v1.request.Request`, a living object that the scheduler goes on changing.

    `num_computed_tokens` counts the step in flight, `num_in_flight_tokens` is its share."""

    request_id: str
    priority: int
    num_computed_tokens: int
    cache_salt: str | None
    kv_transfer_params: dict[str, Any] | None

    @property
    def num_tokens(self) -> int: ...

    @property
    def all_token_ids(self) -> Sequence[int]: ...


class Block(Protocol):
    """`KVCacheBlock`."""

    ref_cnt: int


class BlockPool(Protocol):
    """vLLM's device pages with their reference counts."""

    blocks: Sequence[Block]

    def touch(self, blocks: Sequence[Block]) -> None:
        """One reference more each; a cached block leaves the free list."""

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """One reference less each; the last one makes a block free."""


class BlockCache(Protocol):
    """`KVCacheManager`."""

    block_pool: BlockPool

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]: ...


class BlocksOfRequest(Protocol):
    """`KVCacheBlocks`."""

    def get_block_ids(self) -> tuple[list[int], ...]: ...


class SchedulerOutput(Protocol):
    num_scheduled_tokens: Mapping[str, int]


class ConnectorOutput(Protocol):
    """`KVConnectorOutput`, as far as the scheduler's side reads it."""

    kv_connector_worker_meta: Any
