"""Optimizers, where their states live, the learning rate, and the guards against bad steps."""
