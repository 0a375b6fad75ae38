"""Compute kernels: linear layers, RMSNorm, rotary embeddings, activations, cross-entropy, dropout. Read dispatch.py first."""
