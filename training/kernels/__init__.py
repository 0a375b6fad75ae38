"""Compute kernels: linear layers, RMSNorm, rotary embeddings, activations, cross-entropy, dropout."""
