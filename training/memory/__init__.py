"""Memory savings: activation recomputation, and offloading of optimizer states and parameters."""
