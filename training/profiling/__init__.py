"""Looking into a run: traces of steps, times of their parts, norms of each layer's gradients and updates."""
