"""Kernels that are tuned for CPUs: one oneDNN product, numba's loops, sums of 16-bit numbers, malloc settings."""
