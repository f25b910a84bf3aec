"""Seeded simulation of the whole runtime: one seed is one run, with faults and checkers."""
