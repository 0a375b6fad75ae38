"""3D products: a linear layer on a cube of l x l x l ranks, of which each has a block of every matrix.

Rank (k, i, j) is in layer k, row i and column j of a cube. A product takes the features of an axis of it to those of
another one, and the next product takes them back (Bian et al. 2021). With the columns as inputs and the rows
as outputs

    X: tokens of (k, i), features of j    gathered along the row axis: the tokens of k
    W: outputs of i, inputs of (j, k)     gathered along the layers: the inputs of j
    Y = X W^T, of which the ranks along the column axis have terms, is reduce-scattered there: tokens of (k, j)

So the output has other tokens than the input, and the features of rows. For X of n x h and W of h x h' a rank receives
or sends (l - 1) n h / l^3, (l - 1) h h' / l^3 and (l - 1) n h' / l^3 elements; each gradient takes as many, and both
together share what they gather.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from training.distributed.collectives import gather_rows, scatter_rows
from training.experimental.grids.summa import join, needs_gradient
from training.sharding.axis import Axis


@dataclass(frozen=True)
class Turn:
    """The axes of a product: those of its inputs' and of its outputs' features, and the layers."""

    inputs: Axis
    outputs: Axis
    layers: Axis

    @property
    def back(self) -> "Turn":
        """Return the axes of the product that takes the features back."""
        return Turn(self.outputs, self.inputs, self.layers)


def product_3d(x: Tensor, turn: Turn, *weights: Tensor) -> Tensor:
    """X W^T, differentiable: (B, T, h / l) and (h' / l, h / l^2) to (B, T, h' / l), of other sequences.

    Of several matrices the outputs are one after the other; X is gathered once.
    """
    return _Product.apply(x.flatten(0, -2), turn, *weights).unflatten(0, x.shape[:-1])


class _Product(torch.autograd.Function):
    """Gathers again in the backward pass what it multiplied, and keeps only the blocks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turn: Turn, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.turn = turn
        return scatter_rows(gather_rows(x, turn.outputs) @ gather_inputs(join(weights), turn.layers).T, turn.inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        turn = ctx.turn
        dx = None
        dw = [None] * len(weights)
        dy = gather_rows(grad, turn.inputs)
        if needs_gradient(ctx, 0):
            dx = scatter_rows(dy @ gather_inputs(join(weights), turn.layers), turn.outputs)
        if needs_gradient(ctx, 1):
            dw = scatter_inputs(dy.T @ gather_rows(x, turn.outputs), turn.layers).split([*map(len, weights)])
        return dx, None, *dw


def gather_inputs(weight: Tensor, axis: Axis) -> Tensor:
    """Return the inputs of all ranks along `axis`: (h', h / n) to (h', h)."""
    return gather_rows(weight, axis).unflatten(0, (axis.size, -1)).transpose(0, 1).flatten(1)


def scatter_inputs(grad: Tensor, axis: Axis) -> Tensor:
    """Return this rank's inputs of the sum over the ranks along `axis`: (h', h) to (h', h / n)."""
    return scatter_rows(grad.unflatten(1, (axis.size, -1)).transpose(0, 1).flatten(0, 1), axis)
