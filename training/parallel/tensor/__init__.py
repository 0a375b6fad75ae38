"""Tensor parallelism: every matrix is sharded over ranks, which exchange activations in each layer."""
