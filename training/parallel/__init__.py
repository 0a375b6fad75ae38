"""Tensor, pipeline and data parallelism, applied to the decoder from outside. Read parallelize.py first."""
