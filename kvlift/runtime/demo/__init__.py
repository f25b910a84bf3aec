"""The main job, played and compared: conversations over all tiers in real processes."""
