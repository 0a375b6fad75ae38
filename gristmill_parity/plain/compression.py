"""Plain compression: PowerSGD and 8-bit sums with error feedback, as their papers write them, in one process.

Gradients are given by replica: a list of N tensors. So are the memories in `errors`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 256  # numbers that share a scale
LARGEST = 127  # the largest code


class PlainPowerSGD:
    """PowerSGD of one matrix (n, m): algorithms 1 and 2 of Vogels et al. 2019; the first Q, (m, r), is given."""

    def __init__(self, replicas: int, q: Tensor) -> None:
        self.q = q
        self.errors = [torch.zeros((), dtype=q.dtype)] * replicas

    def sum(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the approximate sum of the replicas' gradients; what is left out is added to the next ones."""
        deltas = [gradient + error for gradient, error in zip(gradients, self.errors, strict=True)]
        p = orthonormal(torch.stack([delta @ self.q for delta in deltas]).sum(0))
        own = [delta.T @ p for delta in deltas]
        self.q = torch.stack(own).sum(0)
        self.errors = [delta - p @ q.T for delta, q in zip(deltas, own, strict=True)]
        return p @ self.q.T


def orthonormal(columns: Tensor) -> Tensor:
    """Return orthonormal columns by Gram and Schmidt, as the paper has it.

    Twice, which is exact enough for columns that are not dependent.
    """
    orthogonal: list[Tensor] = []
    for column in columns.T:
        for _ in range(2):
            for earlier in orthogonal:
                column = column - earlier * (earlier @ column)
        orthogonal.append(column / column.norm())
    return torch.stack(orthogonal, 1)


class PlainInt8:
    """8-bit codes of all matrices as one row (L,), sent as in 1-bit Adam (Tang et al. 2021), with one memory.

    Replica r sums the codes of the r-th of N chunks of whole blocks, and sends codes of the sum.
    """

    def __init__(self, replicas: int) -> None:
        self.errors = [torch.zeros(())] * replicas

    def sum(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the approximate sum (L,) of the replicas' rows; what is left out is added to the next ones."""
        count = len(rows)
        length = len(rows[0])
        chunk = -(-length // (BLOCK * count)) * BLOCK
        given = []
        for row, error in zip(rows, self.errors, strict=True):
            padding = row.new_zeros(count * chunk - length)
            given.append(torch.cat([row, padding]) + error)
        sent = [decoded(row) for row in given]
        exact_sum = torch.stack(sent).sum(0)
        sent_sum = decoded(exact_sum)
        self.errors = [row - codes for row, codes in zip(given, sent, strict=True)]
        for replica, error in enumerate(self.errors):
            own = slice(replica * chunk, (replica + 1) * chunk)
            error[own] += (exact_sum - sent_sum)[own]
        return sent_sum[:length]


def decoded(row: Tensor) -> Tensor:
    """Return the numbers rounded to 8-bit codes: in steps of each block's largest one / 127, a float32."""
    parts = []
    for block in row.split(BLOCK):
        step = (block.abs().max() / LARGEST).float().to(row.dtype)
        if step != 0:
            block = (block / step).round().clamp(-LARGEST, LARGEST) * step
        parts.append(block)
    return torch.cat(parts)
