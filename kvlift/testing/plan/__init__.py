"""Capacity planning: a trace in simulated time, through the real core and the real driver."""
