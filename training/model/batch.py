"""Batch: one data-parallel rank's inputs, targets and sample ids for a step."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One data-parallel rank's sequences of a step, over all micro-batches."""

    ids: Tensor
    """Input tokens (B, T) int64."""
    targets: Tensor
    """Next tokens (B, T) int64."""
    sample_ids: Tensor
    """Ids of the sequences, unique over the run, (B,) int64; keys of counter-based dropout."""

    def pin_memory(self) -> "Batch":
        """Copy to pinned memory, from which transfers to a GPU are asynchronous."""
        return Batch(*(t.pin_memory() for t in (self.ids, self.targets, self.sample_ids)))

    def to(self, device: torch.device) -> "Batch":
        """Copy to `device`, asynchronously from pinned memory."""
        return Batch(*(t.to(device, non_blocking=True) for t in (self.ids, self.targets, self.sample_ids)))
