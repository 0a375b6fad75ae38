"""Dry runs: one rank of a training step on the meta device, without the other ranks."""
