"""What a run trades for memory: activation recomputation, parameter offload, the CPU allocator."""
