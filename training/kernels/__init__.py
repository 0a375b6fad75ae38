"""Compute kernels: linear layers, norm, rotary embedding, activations, cross-entropy, dropout."""
