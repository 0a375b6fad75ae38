"""Memory savings: activation recomputation, offloading of optimizer states and parameters, malloc settings."""
