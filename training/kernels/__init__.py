"""Compute kernels: linear layers, norms, rotary embeddings, activations, cross-entropy, dropout. See dispatch.py."""
