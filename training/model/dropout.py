"""Dropout, counter-based: the mask depends on sequence, layer and element, not on RNG state.

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
        # a tensor: torch.compile would compile every layer anew for its number, and give up at the eighth
        self.p = p
        self.key = torch.tensor(key_from_name(name), device="cpu")

    def forward(self, x: Tensor, sample_ids: Tensor | None) -> Tensor:
        """Drop elements of `x` (B, N, …); `sample_ids` (B,) int64: the ids of its sequences, unique over the run."""
        if not self.training or self.p == 0.0:
            return x
        keys = self.keys(sample_ids).view(-1, *[1] * (x.ndim - 1))
        return x.masked_fill(keyed_bernoulli(self.p, keys, self.index(x)), 0.0) / (1.0 - self.p)

    def keys(self, sample_ids: Tensor | None) -> Tensor:
        """Return the keys of this layer's masks for each sequence, (B,) int64."""
        assert sample_ids is not None, "dropout needs sample_ids in training"
        return splitmix64(sample_ids, self.key)

    def index(self, x: Tensor) -> Tensor:
        """Return the numbers of the elements of a sequence, (N, …) int64, which are all that its masks depend on."""
        return torch.arange(x[0].numel(), device=x.device).view(x.shape[1:])
