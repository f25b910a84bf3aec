"""The reference worker: a small prefill/decode engine that embeds the driver like a scheduler."""
