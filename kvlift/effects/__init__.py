"""What touches the world: copies, stores, ranks, peers and the clock; no policy."""
