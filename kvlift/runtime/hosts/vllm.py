"""kvlift as a KV connector of vLLM (`KVConnectorBase_V1`, 0.32 and 0.33).

    --kv-transfer-config '{"kv_connector": "KvliftConnector",
        "kv_connector_module_path": "kvlift.runtime.hosts.vllm", "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"storage": "/folder"}}'

The only module that imports vLLM, and a thin one: `vllm_scheduler` and `vllm_worker` do the work.
vLLM makes one connector in its scheduler's process and one in each worker's.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from prometheus_client import Counter, Gauge
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvlift.core.tier import Source
from kvlift.runtime.config import ConfigError
from kvlift.runtime.hosts.vllm_metadata import StepOrders, StepReport
from kvlift.runtime.hosts.vllm_requests import ModelWords
from kvlift.runtime.hosts.vllm_scheduler import SchedulerSide
from kvlift.runtime.hosts.vllm_settings import VllmSettings
from kvlift.runtime.hosts.vllm_stats import COUNTERS, GAUGES, added
from kvlift.runtime.hosts.vllm_worker import Place, WorkerSide

_HIT_SOURCES: Final[Mapping[Source, CacheHitSource]] = {
    Source.HOST: CacheHitSource.HOST,
    Source.STORAGE: CacheHitSource.DISK,
    Source.PEER: CacheHitSource.P2P,
}
_WHOLE: Final = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class KvliftMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders."""

    def __init__(self, step: StepOrders) -> None:
        self.step = step


class KvliftWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """One step's ballots."""

    def __init__(self, report: StepReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return KvliftWorkerMetadata(self.report.with_other(other.report))


class KvliftHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where a worker of a prefill instance listens."""

    def __init__(self, address: str) -> None:
        self.address = address


class KvliftStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last step, by the names of `vllm_stats`."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return KvliftStats(data=added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        return {name: n for name, n in self.data.items() if name not in GAUGES}

    def is_empty(self) -> bool:
        return not self.data


class KvliftPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:kvlift_*` in vLLM's own `/metrics`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for kind, names in ((metric_types[Counter], COUNTERS), (metric_types[Gauge], GAUGES)):
            for name, said in names.items():
                base, has_tier, _tier = name.partition("/")
                if base not in self._metrics:
                    labels = [*labelnames, "tier"] if has_tier else labelnames
                    self._metrics[base] = kind(
                        name=f"vllm:kvlift_{base}", documentation=said, labelnames=labels
                    )

    def observe(self, transfer_stats_data: Mapping[str, int], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, n in transfer_stats_data.items():
            base, has_tier, tier = name.partition("/")
            metric = self._metrics.get(base)
            if metric is not None:
                bound = metric.labels(*labels, *([tier] if has_tier else ()))
                bound.set(n) if name in GAUGES else bound.inc(n)


class KvliftConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Host and storage tiers under vLLM's prefix cache, and incremental transfer beside them."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._is_best_effort = transfer.kv_role != "kv_producer"
        settings = VllmSettings.parse(
            transfer.kv_connector_extra_config or {}, is_producer=not self._is_best_effort
        )
        words = _model_words(vllm_config, settings)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        page_bytes = _checked_page_bytes(vllm_config, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(settings, words)
            self._scheduler.open(page_bytes)
            return
        model = f"{words.model} {words.weights} {words.dtype}"
        place = Place(
            rank=get_tensor_model_parallel_rank(),
            n_ranks=words.n_ranks,
            model=model,
            group=str(transfer.engine_id),
            page_tokens=words.page_tokens,
        )
        self._worker = WorkerSide(settings, place)

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a miss later on; a prompt for a decode instance has to arrive."""
        return not self._is_best_effort

    # The scheduler's side.

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "called on a worker's connector"
        return self._scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduling.blocks.bind(kv_cache_manager)

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduling.addresses = tuple(metadata[rank].address for rank in sorted(metadata))

    def on_new_request(self, request: Any) -> None:
        self._scheduling.track(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduling.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.allocated(request, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        split = self._scheduling.sources(request.request_id, num_external_tokens)
        return {_HIT_SOURCES[source]: n for source, n in split.items()}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KvliftMetadata(self._scheduling.step_orders(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        said = connector_output.kv_connector_worker_meta
        self._scheduling.heard(said.report if isinstance(said, KvliftWorkerMetadata) else None)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_whole = request.status in _WHOLE
        is_kept, params = self._scheduling.finished(request, block_ids, is_whole=is_whole)
        if params is not None:
            params["remote_engine_id"] = str(self._kv_transfer_config.engine_id)
        return is_kept, params

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def has_pending_block_frees(self) -> bool:
        return self._scheduling.blocks.has_pending_frees()

    def has_pending_push_work(self) -> bool:
        return self._scheduling.is_busy()

    def reset_cache(self) -> bool | None:
        self._scheduling.reset()
        return True

    def take_events(self) -> Iterable[Any]:
        return ()

    # A worker's side.

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None, "called on the scheduler's connector"
        return self._worker

    def _step(self) -> StepOrders:
        said = self._get_connector_metadata()
        assert isinstance(said, KvliftMetadata)
        return said.step

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._working.keep(self._step())

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._working.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        address = self._working.address
        return KvliftHandshake(address) if address else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._working.obey(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before vLLM runs their request."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Saves begin a step later, with the scheduler's orders."""

    def wait_for_save(self) -> None:
        """Blocks that are read have a reference in the scheduler: nothing to wait for."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, loaded = self._working.taken_results()
        return sent or None, loaded or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, loaded = self._working.taken_results()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=loaded)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._working.taken_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._working.report(self._step())
        return None if report is None else KvliftWorkerMetadata(report)

    # Both.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._worker is not None:
            counts = self._worker.taken_stats()
        else:
            counts = self._scheduling.tally.taken()
        return KvliftStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return KvliftStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return KvliftPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.core.close()


def _model_words(vllm_config: Any, settings: VllmSettings) -> ModelWords:
    """What vLLM says about the model, as far as it decides the bytes of the KV."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    load = vllm_config.load_config
    weights = [str(load.load_format), str(model.revision or ""), settings.weights]
    if str(load.load_format) == "dummy":
        weights.append(f"seed {model.seed}")
    return ModelWords(
        model=settings.model or str(model.model),
        weights=" ".join(weights),
        dtype=f"{model.dtype} {cache.cache_dtype} {model.quantization or ''}",
        page_tokens=cache.block_size,
        n_ranks=vllm_config.parallel_config.tensor_parallel_size,
    )


def _checked_page_bytes(vllm_config: Any, kv_cache_config: Any) -> int:
    """Bytes of a block in all layers of one rank. Raises `ConfigError` for the unknown."""
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"kvlift does not understand {name} above 1 yet: leave it at 1")
    groups: Sequence[Any] = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"this model has {len(groups)} groups of KV caches (hybrid attention): kvlift "
            "understands models with one"
        )
    spec = groups[0].kv_cache_spec
    if getattr(spec, "sliding_window", None) is not None:
        raise ConfigError("sliding windows drop blocks that kvlift would want to save: not yet")
    if spec.block_size != vllm_config.cache_config.block_size:
        raise ConfigError("the KV cache's blocks have another size than cache_config.block_size")
    return int(spec.page_size_bytes) * len(groups[0].layer_names)
