"""SUMMA: the products of a linear layer on a grid of q x q ranks, of which each has a block of every matrix.

Rank (i, j) has block (i, j) of the features X: the tokens of grid row i, the features of grid column j. Of a weight
W, which torch stores as (outputs, inputs), it has the outputs of grid column j and the inputs of grid row i, called
W_ij here: block (i, j) of the paper's B = W^T. A layer and its gradients are then (van de Geijn & Watts 1997; Xu et al.
2021, algorithms 1 to 3)

    Y_ij  = sum over l of  X_il  W_lj^T      what is multiplied is broadcast: X_il along the row, W_lj along the column
    dX_il = sum over j of dY_ij  W_lj        W_lj is broadcast along the column, the terms are summed along the row
    dW_lj = sum over i of dY_ij^T X_il       X_il is broadcast along the row, the terms are summed along the column

Each is q rounds, and what the next round needs is on its way during one. For X of n x h and W of h x h' a rank receives
(q - 1) n h / q^2 elements of X, or sends as many of dX, and (q - 1) h h' / q^2 of W or dW: the same for all three
products. In 2.5D each layer of the grid does this with its own tokens (Wang et al. 2021).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.distributed.collectives import wait
from training.sharding.axis import Axes, Axis


@dataclass(frozen=True)
class Grid:
    """One layer of the grid, as rank (i, j) = (row.rank, column.rank) sees it."""

    row: Axis
    """Along it the grid row changes: its group is the ranks of one grid column."""
    column: Axis
    """Along it the grid column changes: its group is the ranks of one grid row."""
    every: Axis
    """The ranks of all layers, row by row."""

    @classmethod
    def of(cls, axes: Axes) -> "Grid":
        """Return the grid among the axes of a mesh."""
        return cls(axes["row"], axes["column"], axes["tp"])


def summa(x: Tensor, grid: Grid, *weights: Tensor) -> Tensor:
    """X W^T, differentiable: blocks (..., h / q) of X and (h' / q, h / q) of W to the block (..., h' / q).

    Of several matrices the outputs are one after the other; X is sent once.
    """
    return _Summa.apply(x.flatten(0, -2), grid, *weights).unflatten(0, x.shape[:-1])


class _Summa(torch.autograd.Function):
    """Joins the matrices in each pass again: a joined copy would be kept from the one to the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.grid = grid
        return product(x, join(weights), grid)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        dx = input_gradient(grad, join(weights), ctx.grid) if needs_gradient(ctx, 0) else None
        if not needs_gradient(ctx, 1):
            return dx, *[None] * (1 + len(weights))
        return dx, None, *weight_gradient(grad, x, ctx.grid).split([*map(len, weights)])


def join(weights: Sequence[Tensor]) -> Tensor:
    """Return the matrices (outputs, inputs) of the same inputs as one; a single one is not copied."""
    return weights[0] if len(weights) == 1 else torch.cat([*weights])


def needs_gradient(ctx: Any, index: int) -> bool:
    """Return whether this backward pass continues to an argument, numbered among tensors.

    A split one computes gradients of inputs and weights apart.
    """
    node = ctx.next_functions[index][0]
    try:
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf that torch.autograd.grad is asked for
        return True


def product(x: Tensor, weight: Tensor, grid: Grid) -> Tensor:
    """Y = X W^T."""
    y = x.new_zeros(len(x), len(weight))
    for x_il, w_lj in zip(blocks_along(grid.column, x), blocks_along(grid.row, weight), strict=True):
        y.addmm_(x_il, w_lj.T)
    return y


def input_gradient(dy: Tensor, weight: Tensor, grid: Grid) -> Tensor:
    """dX = dY W."""
    return sum_to_each(grid.column, (dy @ w_lj for w_lj in blocks_along(grid.row, weight)))


def weight_gradient(dy: Tensor, x: Tensor, grid: Grid) -> Tensor:
    """dW = dY^T X, over the tokens of this layer of the grid."""
    return sum_to_each(grid.row, (dy.T @ x_il for x_il in blocks_along(grid.column, x)))


def blocks_along(axis: Axis, own: Tensor) -> Iterator[Tensor]:
    """Yield the blocks of the ranks along `axis`, one by one: each is broadcast while the one before it is used."""
    own = own.contiguous()

    def start(root: int) -> tuple[Tensor, dist.Work]:
        block = own if root == axis.rank else torch.empty_like(own)
        work = dist.broadcast(block, group=axis.group, group_src=root, async_op=True)
        assert work is not None
        return block, work

    coming = start(0)
    for following in range(1, axis.size + 1):
        block, work = coming
        if following < axis.size:
            coming = start(following)
        wait(work, axis.group)
        yield block


def sum_to_each(axis: Axis, terms: Iterable[Tensor]) -> Tensor:
    """Sum term l of the ranks along `axis` on rank l; returns this rank's sum.

    A term is sent while the next one is computed.
    """
    own = torch.empty(0)
    sent = None
    for root, computed in enumerate(terms):
        term = computed.contiguous()
        own = term if root == axis.rank else own
        if sent is not None:
            wait(sent, axis.group)
        sent = dist.reduce(term, group=axis.group, group_dst=root, async_op=True)
    assert sent is not None
    wait(sent, axis.group)
    return own
