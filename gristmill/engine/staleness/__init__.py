"""Staleness: whether the record of a task is still true: its inputs, its identity and its outputs."""
