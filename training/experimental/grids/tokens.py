"""Embedding of token ids on a grid, from the block of the matrix that the output layer multiplies with.

Rank (i, j) has the ids of grid column j and the features of grid row i, and needs the tokens of grid row i and the
features of grid column j. So it looks the tokens of all grid rows up; a reduce-scatter along its row leaves it those of
grid row j, in the features of grid row i; rank (j, i) has what it needs, and needs what it has. For n tokens of h
features that is (q - 1) n h / q^2 elements and n h / q^2 more. The paper multiplies one-hot vectors instead, which
broadcasts the matrix: (q - 1) V h / q^2 elements, more wherever a step has fewer tokens than the vocabulary V.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.distributed.collectives import Collective, gather_rows, scatter_rows, wait
from training.experimental.grids.summa import Grid
from training.model.embedding import TokenEmbedding
from training.parallel.tensor.tensor_parallel import lookup


class GridTokens(TokenEmbedding):
    """Embedding of this rank's sequences (B, T): its features of them, (B, T, D / q)."""

    def __init__(self, full: TokenEmbedding, grid: Grid, first: int) -> None:
        nn.Module.__init__(self)
        self.weight = full.weight
        self.grid = grid
        self.first = first

    def forward(self, ids: Tensor) -> Tensor:
        x = lookup(gather_rows(ids, self.grid.row), self.weight, self.first)
        return Collective.apply(x, self.grid, _to_own_tokens, _from_own_tokens)


def _to_own_tokens(x: Tensor, grid: Grid) -> Tensor:
    """Terms of the tokens of all grid rows in the features of one, to the sum for this rank's tokens and features."""
    return exchange(scatter_rows(x, grid.column), grid)


def _from_own_tokens(x: Tensor, grid: Grid) -> Tensor:
    return gather_rows(exchange(x, grid), grid.column)


def exchange(x: Tensor, grid: Grid) -> Tensor:
    """Return the tensor of rank (j, i), of the same shape, which gets this one; without autograd: a transpose."""
    x = x.contiguous()
    i = grid.row.rank
    j = grid.column.rank
    q = grid.row.size
    if i == j:
        return x
    peer = grid.every.rank - (i * q + j) + (j * q + i)  # in the same layer
    received = torch.empty_like(x)
    group = grid.every.group
    both = [(dist.isend, x), (dist.irecv, received)]
    for work in dist.batch_isend_irecv([dist.P2POp(f, t, group=group, group_peer=peer) for f, t in both]):
        wait(work, group)
    return received
