"""The driver that a scheduler embeds, the prefill half, and the reference worker."""
