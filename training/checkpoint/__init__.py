"""Checkpoints: written atomically, loaded under any layout, resumed exactly."""
