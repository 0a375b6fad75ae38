"""Dropout that is a function of which number is dropped: of the sequence, the place in the model, the element.

A sequence's number is unique over the run, so a run that resumes, or is spread otherwise, drops the same.
"""

import torch
from torch import Tensor, nn

from training.kernels.keyed_random import key_of, keyed_below, splitmix64


class Dropout(nn.Module):
    """Zero elements with probability `p` and scale the others by 1 / (1 - p) (Srivastava et al. 2014)."""

    def __init__(self, p: float, site: str) -> None:
        super().__init__()
        self.p, self.key = p, key_of(site)
        self.part = 0  # which of equal parts this process sees, where dimension 1 is divided over processes

    def forward(self, x: Tensor, samples: Tensor | None) -> Tensor:
        """Of `x` (B, N, …); `samples` (B,) int64 are the numbers of its sequences."""
        if not self.training or self.p == 0.0:
            return x
        assert samples is not None, "dropout is keyed by the sequences' numbers"
        size = x[0].numel()
        index = torch.arange(self.part * size, (self.part + 1) * size, device=x.device).view(x.shape[1:])
        keys = splitmix64(samples, self.key).view(-1, *[1] * (x.ndim - 1))
        return x.masked_fill(keyed_below(self.p, keys, index), 0.0) / (1.0 - self.p)
