"""From the word on the command line (`tiny` or a folder) to a decoder and a tokenizer."""

from pathlib import Path

import torch
from attrs import frozen

from kvlift.runtime.worker.model import AllReduce, Decoder, alone
from kvlift.runtime.worker.model_config import ModelConfig, config_from_folder, tiny
from kvlift.runtime.worker.tokenizer import ByteCodec, TextCodec, codec_from_folder
from kvlift.runtime.worker.weights import (
    Shard,
    random_weights,
    weights_digest,
    weights_from_folder,
)

TINY = "tiny"


@frozen
class ModelSource:
    """`model` is `tiny` or a Hugging Face folder; `seed` chooses the tiny model's weights."""

    model: str = TINY
    seed: int = 0

    @property
    def is_tiny(self) -> bool:
        return self.model == TINY

    def config(self) -> ModelConfig:
        """Raises `ModelRefusedError`."""
        return tiny() if self.is_tiny else config_from_folder(Path(self.model))

    def weights_name(self) -> str:
        """What the namespace of page keys says about the weights; reads all of them."""
        return f"random-{self.seed}" if self.is_tiny else weights_digest(Path(self.model))

    def codec(self) -> TextCodec:
        """Raises `ModelRefusedError`."""
        return ByteCodec() if self.is_tiny else codec_from_folder(Path(self.model))

    def decoder(
        self,
        *,
        shard: Shard | None = None,
        device: str = "cpu",
        all_reduce: AllReduce = alone,
    ) -> Decoder:
        """Load this rank's weights. Raises `ModelRefusedError`."""
        part = shard or Shard()
        place = torch.device(device)
        config = self.config()
        if self.is_tiny:
            weights = random_weights(config, seed=self.seed, shard=part, device=place)
        else:
            weights = weights_from_folder(Path(self.model), config, shard=part, device=place)
        return Decoder(config, weights, part, all_reduce)
