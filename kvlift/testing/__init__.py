"""Shipped for embedders: simulated ports, a manual clock, and the story runner."""
