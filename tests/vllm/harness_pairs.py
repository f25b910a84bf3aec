"""The instances that are compared: alone, a pair with NIXL, a pair with kvlift, kvlift alone."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from tests.vllm.harness import ROOT, Process, Server, Sizes, free_port, server, vllm_python

KVLIFT = {
    "kv_connector": "KvliftConnector",
    "kv_connector_module_path": "kvlift.runtime.hosts.vllm",
    "kv_load_failure_policy": "recompute",
}

EAGER = {"prefetch_min_pages": 1, "cost_model": "off"}
"""Fields of kvlift's config with which whatever is on storage is read, however slow it may be."""


@attrs.frozen
class Pair:
    """A prefill instance, a decode instance, and the proxy in front of them."""

    prefill: Server
    decode: Server
    proxy: Process

    @property
    def processes(self) -> tuple[Process, ...]:
        return (self.prefill, self.decode, self.proxy)


def proxy_for(name: str, prefill: Server, decode: Server, folder: Path) -> Process:
    python = vllm_python()
    port = free_port()
    command = [
        *(str(python or sys.executable), str(ROOT / "examples" / "vllm_proxy.py")),
        *("--prefill", prefill.url, "--decode", decode.url, "--port", str(port)),
        *("--connect-timeout-s", "60"),  # servers that share two cores may be slow to accept
    ]
    return Process(name=name, command=command, port=port, log=folder / f"{name}.log")


def _pair(
    name: str,
    sizes: tuple[Sizes, Sizes],
    folder: Path,
    transfers: tuple[Mapping[str, Any], Mapping[str, Any]],
    envs: tuple[Mapping[str, str], Mapping[str, str]],
) -> Pair:
    prefill = server(f"{name}-p", sizes[0], folder, transfers[0], envs[0])
    decode = server(f"{name}-d", sizes[1], folder, transfers[1], envs[1])
    return Pair(prefill, decode, proxy_for(f"{name}-proxy", prefill, decode, folder))


def nixl_pair(prefill: Sizes, decode: Sizes, folder: Path, n_threads: int = 1) -> Pair:
    """NixlConnector alone, over UCX: shared memory and TCP. Each of its threads polls all the time;
    vLLM's default of 4 is meant for more cores than are here."""

    def transfer(role: str) -> dict[str, Any]:
        return {
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"num_threads": n_threads},
        }

    def env() -> dict[str, str]:
        port = str(free_port())
        return {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": port}

    transfers = transfer("kv_producer"), transfer("kv_consumer")
    return _pair("nixl", (prefill, decode), folder, transfers, (env(), env()))


def kvlift_transfer(role: str, **extra: Any) -> dict[str, Any]:
    """The object of `--kv-transfer-config` for one role; `extra`: the connector's own config."""
    return {**KVLIFT, "kv_role": role, "kv_connector_extra_config": extra}


def kvlift_pair(
    prefill: Sizes,
    decode: Sizes,
    folder: Path,
    *,
    name: str = "kvlift",
    **extra: Any,
) -> Pair:
    """KvliftConnector in both roles; `extra` goes to the decode instance: tiers and limits."""
    producer = kvlift_transfer("kv_producer")
    consumer = kvlift_transfer("kv_consumer", **extra)
    return _pair(name, (prefill, decode), folder, (producer, consumer), ({}, {}))


def kvlift_both(sizes: Sizes, folder: Path, *, name: str = "both", **extra: Any) -> Server:
    """One instance with the host and storage tiers and no peer."""
    return server(name, sizes, folder, kvlift_transfer("kv_both", **extra))


def wait_written(folder: Path, timeout_s: float = 30.0) -> None:
    """Until nothing is added to a storage folder for a second."""
    deadline = time.monotonic() + timeout_s
    n_files, since = -1, time.monotonic()
    while time.monotonic() < deadline:
        now = sum(path.is_file() for path in folder.rglob("*"))
        if now != n_files:
            n_files, since = now, time.monotonic()
        elif now and time.monotonic() - since > 1.0:
            return
        time.sleep(0.1)
    raise TimeoutError(f"{folder} has {n_files} files after {timeout_s:.0f} s")
