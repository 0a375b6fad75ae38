"""Documents packed in one sequence that do not see each other: where they are among a micro-batch's tokens."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Documents(NamedTuple):
    """The documents of a micro-batch of B sequences of T tokens, in the order of its tokens."""

    positions: Tensor
    """Positions of the tokens in their documents, (B, T) int64; each 0 starts one, and so does each sequence."""
    bounds: Tensor | None
    """First token of each document and, last, B T, counted over the flattened micro-batch: (documents + 1,) int32.
    None on the meta device."""

    @classmethod
    def of(cls, positions: Tensor) -> "Documents":
        """Find the documents' bounds from `positions`; on a GPU this waits for it, once a micro-batch."""
        if positions.is_meta:
            return cls(positions, None)
        starts = positions == 0
        starts[:, 0] = True
        bounds = F.pad(starts.flatten(), (0, 1), value=True).nonzero().flatten().int()
        return cls(positions, bounds)

    def same(self) -> Tensor:
        """Return which pairs of tokens lie in one document: (B, 1, T, T) bool."""
        number = (self.positions == 0).cumsum(1)
        return number[:, None, :, None] == number[:, None, None]

    def split_sequences(self, x: Tensor) -> Tensor:
        """Return (1, H, B T, E) to (B, H, T, E)."""
        return x[0].unflatten(1, self.positions.shape).transpose(0, 1)

    def join_sequences(self, x: Tensor) -> Tensor:
        """Return (B, H, T, E) to (1, H, B T, E)."""
        return x.transpose(0, 1).flatten(1, 2)[None]
