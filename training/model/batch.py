"""Batch: one data-parallel rank's inputs, targets and sample numbers for a step."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """A replica's share of a step: ids and targets (B, T) int64, and the sequences' numbers (B,) int64."""

    ids: Tensor
    targets: Tensor
    samples: Tensor

    def pinned(self) -> "Batch":
        """In memory from which a GPU can copy while others compute."""
        return Batch(*(t.pin_memory() for t in (self.ids, self.targets, self.samples)))

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(t.to(device, non_blocking=True) for t in (self.ids, self.targets, self.samples)))
