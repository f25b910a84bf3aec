"""One vLLM engine in this process, driven by JSON lines: tests reach into its scheduler and worker.

    python engine.py '{"model": "/folder", "transfer": {...} or null, "options": {...}}' FD

Each line on standard input is a command with a number, each line on file descriptor FD an answer.
The engine steps as long as its scheduler has anything to do, as vLLM's own loop does.
"""

import hashlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams


class Engine:
    """`requests`: what was asked and has not been answered."""

    def __init__(self, model: str, transfer: dict[str, Any] | None, options: dict[str, Any]):
        self.llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            seed=0,
            kv_transfer_config=transfer,
            disable_log_stats=True,
            **options,
        )
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.requests: dict[str, tuple[int, float]] = {}
        self.calls: list[Any] = []

    def step(self) -> list[dict[str, Any]]:
        """One step, if there is anything to do; the answers that it completed."""
        if self.engine.has_unfinished_requests():
            return [self._answer(out) for out in self.engine.step() if out.finished]
        if self.scheduler.has_requests():
            self.core.step_fn()
            time.sleep(0.001)
        return []

    def _answer(self, out: Any) -> dict[str, Any]:
        number, began = self.requests.pop(out.request_id)
        made = out.outputs[0]
        logprobs = [
            places[token].logprob
            for places, token in zip(made.logprobs or (), made.token_ids, strict=True)
        ]
        return {
            "number": number,
            "tokens": list(made.token_ids),
            "logprobs": logprobs,
            "reason": made.finish_reason,
            "n_cached": out.num_cached_tokens,
            "params": out.kv_transfer_params,
            "took_s": time.monotonic() - began,
        }

    # Commands.

    def ask(self, number: int, said: dict[str, Any]) -> None:
        extra = {"kv_transfer_params": said["params"]} if said.get("params") else None
        sampling = SamplingParams(
            temperature=0,
            max_tokens=said.get("n_tokens", 4),
            ignore_eos=True,
            detokenize=False,
            logprobs=1,
            extra_args=extra,
        )
        name = said.get("name") or f"request-{number}"
        prompt: dict[str, Any] = {"prompt_token_ids": said["tokens"]}
        if said.get("salt"):
            prompt["cache_salt"] = said["salt"]
        rid = self.engine.add_request(name, prompt, sampling) or name
        self.requests[name] = (number, time.monotonic())
        self.requests.setdefault(rid, (number, time.monotonic()))

    def abort(self, said: dict[str, Any]) -> dict[str, Any]:
        self.engine.abort_request([said["name"]])
        self.requests.pop(said["name"], None)
        return {}

    def look(self, said: dict[str, Any]) -> dict[str, Any]:
        """Where the engine stands."""
        pool = self.scheduler.kv_cache_manager.block_pool
        side = getattr(self.scheduler.connector, "_scheduler", None)
        seen: dict[str, Any] = {
            "n_blocks": pool.num_gpu_blocks,
            "n_free": pool.get_num_free_blocks(),
            "has_requests": self.scheduler.has_requests(),
            "n_running": len(self.scheduler.running),
            "n_preempted": sum(r.num_preemptions for r in self.scheduler.requests.values()),
            "status": {r: str(q.status) for r, q in self.scheduler.requests.items()},
        }
        if side is not None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            worker = get_kv_transfer_group()._worker
            worker.taken_stats()
            seen["counts"] = {**side.tally.totals, **worker.tally.totals}
            agreed = side.core.state.agreed
            seen["kvlift"] = {
                "held": len(side.blocks),
                "requests": len(agreed.requests),
                "tickets": len(agreed.tickets),
                "drains": len(agreed.drains),
                "descents": len(agreed.descents),
                "device_live": agreed.ledger.device_live,
                "host_live": agreed.ledger.host_live,
                "host_pins": sum(s.host_pins for s in agreed.index.segments.values()),
                "n_host": agreed.index.n_host,
                "loads": len(side._loads) + len(side._draining),
                "tracked": len(side._tracked),
            }
        return seen

    def reset(self, said: dict[str, Any]) -> dict[str, Any]:
        return {"is_reset": self.llm.reset_prefix_cache()}

    def flush(self, said: dict[str, Any]) -> dict[str, Any]:
        from kvlift.core.tier import Tier

        self.scheduler.connector._scheduler.core.flush([Tier(tier) for tier in said["tiers"]])
        return {}

    def _layers(self) -> list[torch.Tensor]:
        worker = self.core.model_executor.driver_worker.worker
        return list(worker.model_runner.kv_caches)

    def digests(self, said: dict[str, Any]) -> dict[str, Any]:
        """SHA-256 of each block that vLLM's prefix cache has, by its hash."""
        return {"by_hash": {name: digest for name, digest, _block in self._cached()}}

    def _cached(self) -> Iterator[tuple[str, str, int]]:
        layers = self._layers()
        for block in self.scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is None:
                continue
            digest = hashlib.sha256()
            for layer in layers:
                digest.update(layer[block.block_id].contiguous().numpy().tobytes())
            yield bytes(block.block_hash).hex(), digest.hexdigest(), block.block_id

    def damage(self, said: dict[str, Any]) -> dict[str, Any]:
        """The negative control: the n-th cached block's signs are turned."""
        block = [block for _name, _digest, block in self._cached()][said["at"]]
        for layer in self._layers():
            layer[block].neg_()
        return {"block": block}

    def record(self, said: dict[str, Any]) -> dict[str, Any]:
        """Names of the connector's methods in the order in which vLLM calls them from now on; with
        `taken`, those since the last time. A step begins with "--"."""
        if said.get("taken"):
            taken, self.calls[:] = list(self.calls), []
            return {"calls": taken}
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        for side in (self.scheduler.connector, get_kv_transfer_group()):
            for name in said["names"]:
                self._recorded(side, name)
        schedule = self.scheduler.schedule

        def scheduled(*args: Any) -> Any:
            self.calls.append("--")
            return schedule(*args)

        self.scheduler.schedule = scheduled
        return {}

    def _recorded(self, side: Any, name: str) -> None:
        original = getattr(side, name)

        def called(*args: Any, **named: Any) -> Any:
            self.calls.append(name)
            return original(*args, **named)

        setattr(side, name, called)

    def slow(self, said: dict[str, Any]) -> dict[str, Any]:
        """From now on each page takes so long: "restore", "store" or "serve"."""
        slowed(said["what"], said["seconds"])
        return {}


def slowed(what: str, seconds: float) -> None:
    from kvlift.effects import copies_cpu
    from kvlift.effects.stores import file_medium
    from kvlift.runtime.hosts import vllm_prefill

    owner, name = {
        "restore": (copies_cpu.CpuCopies, "_copy_page"),
        "store": (file_medium.FileMedium, "read"),
        "serve": (vllm_prefill.KeptPrompts, "page_bytes_for"),
    }[what]
    original = getattr(owner, "_unslowed_" + name, None) or getattr(owner, name)
    setattr(owner, "_unslowed_" + name, original)

    def slow(self: Any, *args: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return original(self, *args, **named)

    setattr(owner, name, slow if seconds else original)


def commands() -> "queue.Queue[dict[str, Any] | None]":
    given: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            given.put(json.loads(line))
        given.put(None)

    threading.Thread(target=read, daemon=True).start()
    return given


def main() -> None:
    out = os.fdopen(int(sys.argv[2]), "w", buffering=1)
    orders = json.loads(sys.argv[1])
    engine = Engine(orders["model"], orders.get("transfer"), orders.get("options", {}))
    given = commands()
    print(json.dumps({"number": 0, "is_ready": True}), file=out)
    while True:
        is_busy = engine.scheduler.has_requests() or engine.engine.has_unfinished_requests()
        try:
            said = given.get(block=not is_busy)
        except queue.Empty:
            said = {}
        if said is None:
            break
        if said:
            number = said["number"]
            if said["do"] == "ask":
                engine.ask(number, said)
            else:
                answer = getattr(engine, said["do"])(said)
                print(json.dumps({"number": number, **answer}), file=out)
        for answer in engine.step():
            print(json.dumps(answer), file=out)
    engine.core.shutdown()


if __name__ == "__main__":
    main()
