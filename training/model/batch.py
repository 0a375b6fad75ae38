"""TokenBatch: one data-parallel rank's inputs, targets, sample ids and positions for a step."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import repeat
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """One data-parallel rank's sequences of a step, over all micro-batches."""

    ids: Tensor
    """Input tokens (B, T) int64."""
    targets: Tensor
    """Next tokens (B, T) int64."""
    sample_ids: Tensor
    """Ids of the sequences, unique over the run, (B,) int64; keys of counter-based dropout."""
    positions: Tensor | None = None
    """Positions of the input tokens in their documents, (B, T) int64, where documents do not see each other."""
    sources: Tensor | None = None
    """The data set of each sequence, (B,) int64, of a mix of several."""
    padding: Tensor | None = None
    """Which inputs are padding, (B, T) bool, where some are: experts do not take them."""

    def chunk(self, count: int) -> list["TokenBatch"]:
        """Split into `count` micro-batches."""
        parts = (repeat(None, count) if t is None else t.chunk(count) for t in self._tensors)
        return [TokenBatch(*part) for part in zip(*parts, strict=True)]

    def rows(self, rows: slice) -> "TokenBatch":
        """Return some of the sequences."""
        return self._map(lambda t: t[rows])

    def pin_memory(self) -> "TokenBatch":
        """Copy to pinned memory, from which transfers to a GPU are asynchronous."""
        return self._map(lambda t: t.pin_memory())

    def to(self, device: torch.device) -> "TokenBatch":
        """Copy to `device`, asynchronously from pinned memory."""
        return self._map(lambda t: t.to(device, non_blocking=True))

    def _map(self, change: Callable[[Tensor], Tensor]) -> "TokenBatch":
        tensors: list[Any] = [None if t is None else change(t) for t in self._tensors]
        return TokenBatch(*tensors)

    @property
    def _tensors(self) -> list[Tensor | None]:
        return [getattr(self, field.name) for field in fields(self)]
