"""Checkpoints of small random models, as in tests/training/generation."""

from tests.training.generation.conftest import checkpoint_of

__all__ = ["checkpoint_of"]
