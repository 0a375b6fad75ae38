"""Trading compute and bandwidth for memory: activation recomputation, offloading, malloc settings."""
