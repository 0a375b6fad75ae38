"""Checkpoints: atomic, independent of the layout, resumed exactly."""
