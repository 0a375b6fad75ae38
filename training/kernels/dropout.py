"""Counter-based dropout: the mask depends on sequence, layer and element, not on RNG state.

Sequence ids are unique over the run, so a resumed run, or one with another layout, drops the same elements.
"""

import torch
from torch import Tensor, nn

from training.kernels.keyed_random import key_from_name, keyed_bernoulli, splitmix64


class Dropout(nn.Module):
    """Zero elements with probability `p` and scale the others by 1 / (1 - p) (Srivastava et al. 2014)."""

    def __init__(self, p: float, name: str) -> None:
        """`name`: the layer's name, unique in the model; its masks are keyed by it."""
        super().__init__()
        self.p, self.key = p, key_from_name(name)
        self.shard_index = 0  # this rank's shard of dimension 1 (heads, or tokens), if that is sharded evenly

    def forward(self, x: Tensor, sample_ids: Tensor | None) -> Tensor:
        """Drop elements of `x` (B, N, …); `sample_ids` (B,) int64: the ids of its sequences, unique over the run."""
        if not self.training or self.p == 0.0:
            return x
        assert sample_ids is not None, "dropout needs sample_ids in training"
        size = x[0].numel()
        index = torch.arange(self.shard_index * size, (self.shard_index + 1) * size, device=x.device).view(x.shape[1:])
        keys = splitmix64(sample_ids, self.key).view(-1, *[1] * (x.ndim - 1))
        return x.masked_fill(keyed_bernoulli(self.p, keys, index), 0.0) / (1.0 - self.p)
