"""Embedding of token ids on a grid, from the block of the matrix that the output layer multiplies with.

Rank (i, j) has the ids of grid column j and the features of grid row i, and needs the tokens of grid row i and the
features of grid column j. So it looks the tokens of all grid rows up; a reduce-scatter along its row leaves it those of
grid row j, in the features of grid row i; rank (j, i) has what it needs, and needs what it has. For n tokens of h
features that is (q - 1) n h / q^2 elements and n h / q^2 more. The paper multiplies one-hot vectors instead, which
broadcasts the matrix: (q - 1) V h / q^2 elements, more wherever a step has fewer tokens than the vocabulary V.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.distributed.collectives import gather_rows, scatter_rows, wait
from training.experimental.grids.summa import Grid
from training.kernels.dispatch import embedding
from training.model.embedding import TokenEmbedding
from training.sharding.shard_spec import ShardSpec


class GridTokens(TokenEmbedding):
    """Embedding of this rank's sequences (B, T): its features of them, (B, T, D / q)."""

    def __init__(self, full: TokenEmbedding, grid: Grid, piece: ShardSpec) -> None:
        nn.Module.__init__(self)
        self.weight, self.grid = full.weight, grid
        self.first, self.count = piece.offset[0], piece.size[0]

    def forward(self, ids: Tensor) -> Tensor:
        local = gather_rows(ids, self.grid.row) - self.first
        mine = (local >= 0) & (local < self.count)
        x = embedding(local.clamp(0, self.count - 1), self.weight) * mine[..., None]
        return _ToOwnTokens.apply(x, self.grid)


class _ToOwnTokens(torch.autograd.Function):
    """Terms of the tokens of all grid rows in the features of one, to the sum for this rank's tokens and features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid) -> Tensor:
        ctx.grid = grid
        return exchange(scatter_rows(x, grid.column), grid)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather_rows(exchange(grad.contiguous(), ctx.grid), ctx.grid.column), None


def exchange(x: Tensor, grid: Grid) -> Tensor:
    """The tensor of rank (j, i), of the same shape, which gets this one: the transpose of the grid."""
    i, j, q = grid.row.rank, grid.column.rank, grid.row.size
    if i == j:
        return x
    peer = grid.every.rank - (i * q + j) + (j * q + i)  # in the same layer
    found, group = torch.empty_like(x), grid.every.group
    both = [(dist.isend, x), (dist.irecv, found)]
    for work in dist.batch_isend_irecv([dist.P2POp(f, t, group=group, group_peer=peer) for f, t in both]):
        wait(work, group)
    return found
