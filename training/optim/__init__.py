"""Optimizers: AdamW with in-memory or on-disk moments, the learning-rate schedule, loss scaling."""
