"""A double of vLLM's engine around a connector: its calls in its order, and blocks with an oracle.

What a block holds is a function of the tokens up to its end and of the rank, so that every wrong
byte shows: whenever a request runs, all that it stands on is compared. `tests/vllm` checks that the
real engine makes the same calls in the same order.
"""

import functools
import hashlib
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from tests.hosts import vllm_stand_in as stand_in
from tests.hosts.vllm_stand_in import RequestStatus as Status

BLOCK = 4
HEADS, WIDTH, N_LAYERS = 2, 6, 3


@attrs.define(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    words: bytes | None = None
    """The tokens that vLLM's prefix cache knows it by."""


class Pool:
    """`BlockPool`: block 0 is nobody's."""

    def __init__(self, n_blocks: int) -> None:
        self.blocks = [Block(n) for n in range(n_blocks)]
        self.blocks[0].ref_cnt = 1
        self.free: deque[Block] = deque(self.blocks[1:])
        self.by_words: dict[bytes, Block] = {}

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Any) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt > 0, "a block was freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free.appendleft(block) if block.words is None else self.free.append(block)

    def new(self, n: int) -> list[Block] | None:
        if n > len(self.free):
            return None
        taken = [self.free.popleft() for _ in range(n)]
        for block in taken:
            if block.words is not None and self.by_words.get(block.words) is block:
                del self.by_words[block.words]
            block.words, block.ref_cnt = None, 1
        return taken

    def reset(self) -> bool:
        if len(self.free) != len(self.blocks) - 1:
            return False
        self.by_words.clear()
        for block in self.blocks:
            block.words = None
        return True


@attrs.define(eq=False)
class Request:
    """`vllm.v1.request.Request`."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int = 0
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    output: list[int] = attrs.field(factory=list)
    blocks: list[Block] = attrs.field(factory=list)
    answer: dict[str, Any] | None = None
    n_external: int = 0

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output)


def words_of(request: Request, n_tokens: int) -> bytes:
    return f"{request.cache_salt}:{request.all_token_ids[:n_tokens]}".encode()


def content(words: bytes, rank: int, layer: int) -> torch.Tensor:
    """`[heads, tokens, width]` of a block whose last token ends `words`."""
    seed = hashlib.sha256(words + bytes((rank, layer))).digest()
    n_bytes = HEADS * BLOCK * WIDTH * 4
    stream = (seed * (n_bytes // len(seed) + 1))[:n_bytes]
    ints = torch.frombuffer(bytearray(stream), dtype=torch.int32)
    return (ints.float() / 2**31).view(HEADS, BLOCK, WIDTH)


class Worker:
    """One rank: its KV tensors and its half of the connector."""

    def __init__(self, rank: int, n_blocks: int) -> None:
        self.rank = rank
        self.layers = [torch.zeros(n_blocks, HEADS, BLOCK, WIDTH) for _ in range(N_LAYERS)]
        self.connector: Any = None
        self.log: list[str] = []

    def compute(self, request: Request, start: int, stop: int) -> None:
        """Write the KV of the tokens [start, stop), a slot a token."""
        for at in range(start, stop):
            words = words_of(request, at + 1)
            block = request.blocks[at // BLOCK].block_id
            for layer, tensor in enumerate(self.layers):
                tensor[block, :, at % BLOCK] = content(words, self.rank, layer)[:, 0]

    def check(self, request: Request, n_tokens: int) -> None:
        """Everything that the request stands on is what its tokens make."""
        for at in range(n_tokens):
            block = request.blocks[at // BLOCK].block_id
            words = words_of(request, at + 1)
            for layer, tensor in enumerate(self.layers):
                wanted = content(words, self.rank, layer)[:, 0]
                if not torch.equal(tensor[block, :, at % BLOCK], wanted):
                    raise AssertionError(
                        f"{request.request_id}: token {at} in block {block} of layer {layer} on "
                        f"rank {self.rank} is wrong"
                    )

    def step(self, meta: Any, finished: set[str], forward: Callable[[], None]) -> dict[str, Any]:
        """`KVConnectorModelRunnerMixin._get_kv_connector_output`."""
        connector = self.connector
        self._called("bind_connector_metadata", meta)
        forward()
        self._called("start_load_kv", None)
        self._called("wait_for_save")
        results = self._called("get_transfer_results", finished)
        output = {
            "sent": results.finished_sending,
            "received": results.finished_recving,
            "invalid": self._called("get_block_ids_with_load_errors"),
            "stats": self._called("get_kv_connector_stats"),
            "meta": self._called("build_connector_worker_meta"),
        }
        assert connector is not None
        self._called("clear_connector_metadata")
        return output

    def _called(self, name: str, *args: Any) -> Any:
        self.log.append(name)
        return getattr(self.connector, name)(*args)


class Engine:
    """One engine: `step()` as vLLM's engine core makes it."""

    def __init__(
        self,
        connector_class: type[Any],
        role: str,
        extra: dict[str, Any],
        *,
        n_blocks: int = 64,
        n_ranks: int = 1,
        name: str = "engine",
    ) -> None:
        self.pool = Pool(n_blocks)
        self.block_pool = self.pool
        self.workers = [Worker(rank, n_blocks) for rank in range(n_ranks)]
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished_ids: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self._n_sent: dict[str, int] = {}
        self._n_received: dict[str, int] = {}
        self.stats: dict[str, int] = {}
        self.log: list[str] = []
        self.n_preempted = 0
        config, kv = vllm_config(role, extra, n_ranks, name), kv_cache_config()
        self.connector = connector_class(config, stand_in.KVConnectorRole.SCHEDULER, kv)
        self.connector.bind_kv_cache_manager(self)
        metadata = {}
        for worker in self.workers:
            stand_in.RANK[0] = worker.rank
            worker.connector = connector_class(config, stand_in.KVConnectorRole.WORKER, kv)
            layers = {f"layer.{n}": tensor for n, tensor in enumerate(worker.layers)}
            worker.connector.register_kv_caches(layers)
            if (said := worker.connector.get_handshake_metadata()) is not None:
                metadata[worker.rank] = said
        if metadata:
            self.connector.set_xfer_handshake_metadata(metadata)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """As `KVCacheManager`."""
        return ([block.block_id for block in self.requests[request_id].blocks],)

    def add(self, request: Request) -> Request:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self._called("on_new_request", request)
        return request

    def abort(self, rid: str) -> None:
        request = self.requests.get(rid)
        if request is None or request.answer is not None:
            return
        waits = request.status is Status.WAITING_FOR_REMOTE_KVS and rid not in self.received
        self.received.discard(rid)
        self.failed.discard(rid)
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        self._finish(request, Status.FINISHED_ABORTED, delay=waits)

    def has_requests(self) -> bool:
        return bool(self.finished_ids or self.requests or self.connector.has_pending_push_work())

    # One step.

    def step(self) -> None:
        self.log.append("--")
        scheduled = self._schedule_running()
        if not self._was_preempted:
            scheduled |= self._schedule_waiting()
        meta = self._called(
            "build_connector_meta", types.SimpleNamespace(num_scheduled_tokens=scheduled)
        )
        for rid, n_tokens in scheduled.items():
            self.requests[rid].num_computed_tokens += n_tokens
            self.requests[rid].num_in_flight_tokens += n_tokens
        finished, self.finished_ids = self.finished_ids, set()
        outputs = [
            worker.step(meta, finished, functools.partial(self._forward, worker, scheduled))
            for worker in self.workers
        ]
        self._update(scheduled, outputs)

    def _forward(self, worker: Worker, scheduled: dict[str, int]) -> None:
        for rid, n_tokens in scheduled.items():
            request = self.requests[rid]
            start = request.num_computed_tokens - n_tokens
            worker.check(request, start)
            worker.compute(request, start, request.num_computed_tokens)

    def _schedule_running(self) -> dict[str, int]:
        scheduled: dict[str, int] = {}
        self._was_preempted = False
        at = 0
        while at < len(self.running):
            request = self.running[at]
            n_new = request.num_tokens - request.num_computed_tokens
            while not self._allocated(request, request.num_tokens):
                if self.connector.has_pending_block_frees():
                    return scheduled
                victim = self.running.pop()
                scheduled.pop(victim.request_id, None)
                self._preempt(victim)
                if victim is request:
                    return scheduled
            scheduled[request.request_id] = n_new
            at += 1
        return scheduled

    def _preempt(self, request: Request) -> None:
        self._was_preempted = True
        self._free(request)
        request.status, request.num_computed_tokens = Status.PREEMPTED, 0
        request.num_preemptions += 1
        self.n_preempted += 1
        self.waiting.appendleft(request)

    def _schedule_waiting(self) -> dict[str, int]:
        scheduled: dict[str, int] = {}
        skipped: list[Request] = []
        # Requests that hold blocks come first, as in vLLM's `kv_holding_waiting`.
        self.waiting = deque(sorted(self.waiting, key=lambda request: not request.blocks))
        while self.waiting:
            request = self.waiting[0]
            if request.status is Status.WAITING_FOR_REMOTE_KVS and not self._arrived(request):
                skipped.append(self.waiting.popleft())
                continue
            cached: list[Block] = []
            n_external, is_async = 0, False
            if request.num_computed_tokens == 0:
                cached = self._cached(request)
                n_local = len(cached) * BLOCK
                found = self._called("get_num_new_matched_tokens", request, n_local)
                if found[0] is None:
                    skipped.append(self.waiting.popleft())
                    continue
                n_external, is_async = found
                n_computed = n_local + n_external
                assert n_computed <= request.num_tokens
                assert is_async == (n_external > 0)
            else:
                n_computed = request.num_computed_tokens
            n_wanted = n_computed if is_async else request.num_tokens
            if is_async and not self._fits(request, cached, skipped):
                break
            self.pool.touch(cached)
            request.blocks += cached
            if not self._allocated(request, n_wanted):
                self.pool.free_blocks(cached)
                del request.blocks[len(request.blocks) - len(cached) :]
                break
            self._called("update_state_after_alloc", request, None, n_external)
            if is_async:
                split = self.connector.get_external_cache_hit_sources(request, n_external)
                assert sum(split.values()) == n_external
                request.status = Status.WAITING_FOR_REMOTE_KVS
                request.num_computed_tokens = n_computed
                request.n_external = n_external
                skipped.append(self.waiting.popleft())
                continue
            self.running.append(self.waiting.popleft())
            scheduled[request.request_id] = request.num_tokens - n_computed
            request.status, request.num_computed_tokens = Status.RUNNING, n_computed
        self.waiting.extendleft(reversed(skipped))
        return scheduled

    def _fits(self, request: Request, cached: Sequence[Block], skipped: Sequence[Request]) -> bool:
        """Whoever loads holds blocks and can't be preempted: so all of it has to fit, beside what
        the others that load will still need. A cached block that nobody holds is a free one."""
        loading = [r for r in (*skipped, *self.waiting) if r.blocks and r is not request]
        owed = sum(-(-r.num_tokens // BLOCK) - len(r.blocks) for r in loading)
        n_held = sum(block.ref_cnt > 0 for block in cached)
        return -(-request.num_tokens // BLOCK) - n_held + owed <= len(self.pool.free)

    def _cached(self, request: Request) -> list[Block]:
        found: list[Block] = []
        for page in range((request.num_tokens - 1) // BLOCK):
            block = self.pool.by_words.get(words_of(request, (page + 1) * BLOCK))
            if block is None:
                break
            found.append(block)
        return found

    def _allocated(self, request: Request, n_tokens: int) -> bool:
        n_lacking = -(-n_tokens // BLOCK) - len(request.blocks)
        fresh = self.pool.new(max(0, n_lacking))
        if fresh is None:
            return False
        request.blocks += fresh
        return True

    def _arrived(self, request: Request) -> bool:
        """`_update_waiting_for_remote_kv`."""
        rid = request.request_id
        if rid not in self.received:
            return False
        if rid in self.failed:
            self.failed.remove(rid)
            if not request.num_computed_tokens:
                self._free(request)
        self._cache(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        self.received.remove(rid)
        request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING
        return True

    def _cache(self, request: Request, n_tokens: int) -> None:
        for page in range(n_tokens // BLOCK):
            block, words = request.blocks[page], words_of(request, (page + 1) * BLOCK)
            if block.words is None:
                block.words = words
                self.pool.by_words.setdefault(words, block)

    def _update(self, scheduled: dict[str, int], outputs: list[dict[str, Any]]) -> None:
        """`update_from_output`, with `KVOutputAggregator` before it."""
        sent = self._counted("sent", self._n_sent, outputs)
        received = self._counted("received", self._n_received, outputs)
        for output in outputs:
            for name, n in (output["stats"].data if output["stats"] else {}).items():
                self.stats[name] = self.stats.get(name, 0) + n
        self._truncate(set().union(*(output["invalid"] for output in outputs)))
        for rid, n_tokens in scheduled.items():
            request = self.requests.get(rid)
            if request is None or request.status is not Status.RUNNING:
                continue
            request.num_in_flight_tokens -= n_tokens
            self._cache(request, request.num_computed_tokens)
            if request.num_computed_tokens == request.num_tokens:
                request.output.append(sum(request.all_token_ids) % 997)
                if len(request.output) >= request.max_tokens:
                    self.running.remove(request)
                    self._finish(request, Status.FINISHED_LENGTH_CAPPED)
        meta = outputs[0]["meta"]
        for output in outputs[1:]:
            meta = meta if meta is None else meta.aggregate(output["meta"])
        if scheduled or meta or any(any(output.values()) for output in outputs):
            said = types.SimpleNamespace(kv_connector_worker_meta=meta)
            self._called("update_connector_output", said)
        for rid in received:
            if self.requests[rid].status is Status.WAITING_FOR_REMOTE_KVS:
                self.received.add(rid)
            else:
                assert self.requests[rid].answer is not None
                self._free(self.requests.pop(rid))
        for rid in sent:
            self._free(self.requests.pop(rid))
        stats = self._called("get_kv_connector_stats")
        for name, n in (stats.data if stats else {}).items():
            self.stats[name] = self.stats.get(name, 0) + n
        self._called("take_events")

    def _counted(
        self, name: str, counts: dict[str, int], outputs: list[dict[str, Any]]
    ) -> list[str]:
        done = []
        for output in outputs:
            for rid in output[name] or ():
                counts[rid] = counts.get(rid, 0) + 1
                if counts[rid] == len(self.workers):
                    del counts[rid]
                    done.append(rid)
        return done

    def _truncate(self, invalid: set[int]) -> None:
        for request in self.waiting:
            if request.status is not Status.WAITING_FOR_REMOTE_KVS:
                continue
            n_blocks = -(-request.num_computed_tokens // BLOCK)
            for page, block in enumerate(request.blocks[:n_blocks]):
                if block.block_id in invalid:
                    request.num_computed_tokens = page * BLOCK
                    self.failed.add(request.request_id)
                    break

    def _finish(self, request: Request, status: Status, *, delay: bool = False) -> None:
        request.status = status
        n_blocks = -(-request.num_computed_tokens // BLOCK)
        ids = [block.block_id for block in request.blocks[:n_blocks]]
        is_kept, params = self._called("request_finished_all_groups", request, (ids,))
        request.answer = {"tokens": request.output, "params": params}
        self.finished_ids.add(request.request_id)
        if not (is_kept or delay):
            self._free(self.requests.pop(request.request_id))

    def _free(self, request: Request) -> None:
        self.pool.free_blocks(reversed(request.blocks))
        request.blocks = []

    def _called(self, name: str, *args: Any) -> Any:
        self.log.append(name)
        return getattr(self.connector, name)(*args)

    def close(self) -> None:
        for worker in self.workers:
            worker.connector.shutdown()


def vllm_config(role: str, extra: dict[str, Any], n_ranks: int, name: str) -> Any:
    known = types.SimpleNamespace
    return known(
        kv_transfer_config=known(
            kv_role=role, kv_connector_extra_config=extra, engine_id=f"engine-{name}"
        ),
        model_config=known(
            model="a/model", revision=None, seed=0, dtype="float32", quantization=None
        ),
        cache_config=known(block_size=BLOCK, cache_dtype="auto"),
        load_config=known(load_format="auto"),
        parallel_config=known(
            tensor_parallel_size=n_ranks, pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
    )


def kv_cache_config() -> Any:
    known = types.SimpleNamespace
    spec = known(page_size_bytes=HEADS * BLOCK * WIDTH * 4, block_size=BLOCK, sliding_window=None)
    names = [f"layer.{n}" for n in range(N_LAYERS)]
    return known(kv_cache_groups=[known(kv_cache_spec=spec, layer_names=names)])


PAGE_BYTES = HEADS * BLOCK * WIDTH * 4 * N_LAYERS
