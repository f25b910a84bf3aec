"""A Llama-shaped model with random weights made on the device: its work is real, not its words."""

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from attrs import frozen

from kvlift.cli.benches.ttft.attention import paged_attention, prefill_attention
from kvlift.cli.benches.ttft.sizes import Sizes
from kvlift.effects.device_memory import LayeredMemory

ROPE_BASE = 500_000.0
EPSILON = 1e-5


@frozen
class Layer:
    """Weights as `F.linear` takes them, `[out, in]`."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@frozen(eq=False)
class Model:
    sizes: Sizes
    device: torch.device
    embedding: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor
    layers: tuple[Layer, ...]
    rope: torch.Tensor
    """cos and sin, `[2, n_tokens, head_dim // 2]`."""

    @classmethod
    def random(cls, sizes: Sizes, device: torch.device, seed: int) -> "Model":
        """Equal seeds on equal devices give equal weights."""
        generator = torch.Generator(device).manual_seed(seed)
        dtype = sizes.layout.torch_dtype

        def weight(n_out: int, n_in: int) -> torch.Tensor:
            fresh = torch.empty((n_out, n_in), dtype=dtype, device=device)
            return fresh.normal_(0.0, n_in**-0.5, generator=generator)

        width = sizes.n_heads * sizes.head_dim
        width_kv = sizes.n_kv_heads * sizes.head_dim
        layers = tuple(
            Layer(
                weight(width + 2 * width_kv, sizes.hidden),
                weight(sizes.hidden, width),
                weight(2 * sizes.ffn, sizes.hidden),
                weight(sizes.hidden, sizes.ffn),
            )
            for _ in range(sizes.n_layers)
        )
        half = torch.arange(sizes.head_dim // 2, device=device, dtype=torch.float32)
        turns = torch.arange(sizes.n_tokens_max, device=device, dtype=torch.float32)
        angles = turns[:, None] * ROPE_BASE ** (-2 * half / sizes.head_dim)
        return cls(
            sizes,
            device,
            weight(sizes.vocab, sizes.hidden),
            weight(sizes.vocab, sizes.hidden),
            torch.ones(sizes.hidden, dtype=dtype, device=device),
            layers,
            torch.stack((angles.cos(), angles.sin())).to(dtype),
        )

    @torch.inference_mode()
    def prefill(self, tokens: torch.Tensor, start: int, kv: torch.Tensor) -> torch.Tensor:
        """Compute `tokens`, int64 `[n]`, at positions from `start` on; their KV goes into `kv`,
        `[2 * n_layers, n_tokens_max, n_kv_heads, head_dim]`. The last token's greedy successor."""
        stop = start + len(tokens)
        x = self.embedding[tokens]
        turn = self.rope[:, start:stop]
        for number, layer in enumerate(self.layers):
            q, k, v = self._projected(layer, x, turn)
            kv[2 * number, start:stop] = k
            kv[2 * number + 1, start:stop] = v
            seen = prefill_attention(q, kv[2 * number, :stop], kv[2 * number + 1, :stop])
            x = self._rest_of_layer(layer, x, seen)
        return self._greedy(x[-1:])

    @torch.inference_mode()
    def decode(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        memory: LayeredMemory,
    ) -> torch.Tensor:
        """One token for each row of the batch: `tokens`, `positions` `[rows]`, `table` the pages of
        each row, int32 `[rows, n_pages_max]`. KV goes to its place in `memory`."""
        span = self.sizes.page_tokens
        page = table.gather(1, (positions // span)[:, None]).squeeze(1)
        place = page.long() * span + positions % span
        lengths = (positions + 1).int()
        x = self.embedding[tokens]
        turn = self.rope[:, positions]
        assert memory.v_layers is not None
        for number, layer in enumerate(self.layers):
            k_layer, v_layer = memory.k_layers[number], memory.v_layers[number]
            q, k, v = self._projected(layer, x, turn)
            k_layer.index_copy_(0, place, k)
            v_layer.index_copy_(0, place, v)
            seen = paged_attention(q, k_layer, v_layer, table, lengths, span, self.sizes.n_splits)
            x = self._rest_of_layer(layer, x, seen)
        return self._greedy(x)

    def _projected(
        self, layer: Layer, x: torch.Tensor, turn: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = self.sizes
        joined = F.linear(self._normed(x), layer.qkv).view(len(x), -1, sizes.head_dim)
        n_turned = sizes.n_heads + sizes.n_kv_heads
        turned = _turned(joined[:, :n_turned], turn)
        return turned[:, : sizes.n_heads], turned[:, sizes.n_heads :], joined[:, n_turned:]

    def _rest_of_layer(self, layer: Layer, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        x = x + F.linear(seen.reshape(len(x), -1), layer.out)
        gate, up = F.linear(self._normed(x), layer.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, layer.down)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.sizes.hidden,), self.norm, EPSILON)

    def _greedy(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self._normed(x), self.head).argmax(-1)


def _turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotary positions: `x` is `[n, heads, dim]`, `turn` cos and sin `[2, n, dim // 2]`."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = turn[0][:, None], turn[1][:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
