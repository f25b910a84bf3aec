"""Engines that host kvlift by a door of their own. Each is imported by its engine alone."""
