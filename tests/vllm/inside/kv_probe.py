"""Loaded into vLLM's workers (`--worker-extension-cls kv_probe.KvProbe`): looks at KV blocks.

Called through `POST /collective_rpc`. A block is the bytes of all layers at one block id, K and V.
"""

import hashlib
import os
from typing import Any

import torch


class KvProbe:
    """Mixed into the worker by vLLM; every method's name starts with `probe_`."""

    model_runner: Any

    def _probe_layers(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for entry in self.model_runner.kv_caches:
            found += entry if isinstance(entry, list | tuple) else [entry]
        return found

    def probe_pid(self) -> dict[str, int]:
        return {"pid": os.getpid()}

    def probe_shape(self) -> dict[str, Any]:
        layers = self._probe_layers()
        return {"n_layers": len(layers), "shape": list(layers[0].shape)}

    def probe_blocks(self) -> dict[str, str]:
        """Digest by id of the blocks that are not all zero; block 0 is vLLM's null block."""
        layers = self._probe_layers()
        found = {}
        for block in range(1, layers[0].shape[0]):
            if not bool(layers[0][block].any()):
                continue
            digest = hashlib.sha256()
            for layer in layers:
                digest.update(layer[block].contiguous().numpy().tobytes())
            found[str(block)] = digest.hexdigest()
        return found

    def probe_damage(self, block: str) -> dict[str, Any]:
        """Turn the signs of one block of every layer: the negative control of the comparisons."""
        layers = self._probe_layers()
        for layer in layers:
            layer[int(block)].neg_()
        return {"block": int(block), "n_layers": len(layers)}
