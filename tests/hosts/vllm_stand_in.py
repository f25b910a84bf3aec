"""vLLM's names that `kvlift.runtime.hosts.vllm` imports, without vLLM: just enough to be a base."""

import enum
import sys
import types
from typing import Any

import attrs
import pytest


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class Base:
    """`KVConnectorBase_V1`, as far as a connector leans on it."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._metadata: object = None
        self.role = role

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Not of interest here."""

    def bind_connector_metadata(self, metadata: object) -> None:
        self._metadata = metadata

    def clear_connector_metadata(self) -> None:
        self._metadata = None

    def _get_connector_metadata(self) -> object:
        assert self._metadata is not None
        return self._metadata


class Bare:
    """Any of vLLM's empty bases."""


@attrs.define
class TransferResults:
    finished_sending: set[str] = attrs.field(factory=set)
    finished_recving: set[str] = attrs.field(factory=set)
    failed_recving: set[str] = attrs.field(factory=set)


class Stats:
    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data = data or {}


class PromMetrics:
    def __init__(
        self, config: Any, types: Any, labelnames: list[str], values: dict[int, list[object]]
    ) -> None:
        self.per_engine_labelvalues = values


class CacheHitSource(enum.Enum):
    HOST = "host"
    DISK = "disk"
    P2P = "p2p"


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()


RANK = [0]
"""Which worker is being made; vLLM asks torch.distributed."""

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_NAMES: dict[str, dict[str, object]] = {
    "vllm": {},
    "vllm.distributed": {"get_tensor_model_parallel_rank": lambda: RANK[0]},
    "vllm.distributed.kv_transfer": {},
    "vllm.distributed.kv_transfer.kv_connector": {},
    _V1: {},
    f"{_V1}.base": {
        "KVConnectorBase_V1": Base,
        "KVConnectorHandshakeMetadata": Bare,
        "KVConnectorMetadata": Bare,
        "KVConnectorRole": KVConnectorRole,
        "KVConnectorTransferResults": TransferResults,
        "KVConnectorWorkerMetadata": Bare,
        "SupportsHMA": type("SupportsHMA", (), {}),
    },
    f"{_V1}.metrics": {"KVConnectorPromMetrics": PromMetrics, "KVConnectorStats": Stats},
    "vllm.v1": {},
    "vllm.v1.metrics": {},
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": CacheHitSource},
    "vllm.v1.request": {"RequestStatus": RequestStatus},
}


def connector_class(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """`KvliftConnector`, imported on top of these names; forgotten when the test ends."""
    for name, members in _NAMES.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "kvlift.runtime.hosts.vllm", raising=False)
    import kvlift.runtime.hosts.vllm as entry

    monkeypatch.delitem(sys.modules, "kvlift.runtime.hosts.vllm")
    found: type[Any] = entry.KvliftConnector
    return found
