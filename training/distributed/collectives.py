"""The collectives of tensor parallelism as differentiable functions: what forward does, backward undoes.

Each pair is conjugate (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, figure 5). x is (B, T, D).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.distributed.mesh import Axis

# torch 2.13 has new names for them
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def copy_to_tp(x: Tensor, axis: Axis) -> Tensor:
    """x as it is; its gradients, which the processes have parts of, are summed."""
    return _CopyToTP.apply(x, axis)


def reduce_from_tp(x: Tensor, axis: Axis) -> Tensor:
    """The sum of the processes' x; its gradient goes to each as it is."""
    return _ReduceFromTP.apply(x, axis)


def gather_from_sp(x: Tensor, axis: Axis) -> Tensor:
    """The whole sequence, of which each has (B, T / n, D); gradients are summed, and each gets its part."""
    return _GatherFromSP.apply(x, axis)


def reduce_scatter_to_sp(x: Tensor, axis: Axis) -> Tensor:
    """This process's part, (B, T / n, D), of the sum of the processes' x; gradients are gathered."""
    return _ReduceScatterToSP.apply(x, axis)


class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)  # others may hold the same
        dist.all_reduce(grad, group=ctx.axis.group)
        return grad, None


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=axis.group)
        return x

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFromSP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _all_gather_sequence(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter_sequence(grad, ctx.axis), None


class _ReduceScatterToSP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _reduce_scatter_sequence(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather_sequence(grad, ctx.axis), None


def _all_gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    parts = x.new_empty(axis.size, *x.shape)
    all_gather(parts.flatten(0, 1), x.contiguous(), group=axis.group)
    return parts.transpose(0, 1).flatten(1, 2)


def _reduce_scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    parts = x.unflatten(1, (axis.size, -1)).transpose(0, 1).contiguous()
    mine = torch.empty_like(parts[0])
    reduce_scatter(mine, parts.flatten(0, 1), group=axis.group)
    return mine
