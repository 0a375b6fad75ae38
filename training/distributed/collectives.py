"""Collectives: the differentiable ones of tensor and sequence parallelism, in Megatron's terms; of rows; and `wait`.

=====================  ======================  ======================
function               forward                 backward
=====================  ======================  ======================
copy_to_tp             identity                all-reduce
reduce_from_tp         all-reduce              identity
gather_from_sp         all-gather over T       reduce-scatter over T
reduce_scatter_to_sp   reduce-scatter over T   all-gather over T
=====================  ======================  ======================

The first two are f and g of Shoeybi et al. 2019, section 3; the last two those of Korthikanti et al. 2022, section
4.2.2. Activations are (B, T, D), or (B, T / n, D) where the sequence is sharded over the n ranks of `axis`. In a ring
each rank sends (n - 1) / n of the full tensor's bytes, and twice that for an all-reduce.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.sharding.axis import Axis, JointAxis

Communicate = Callable[[Tensor, Axis], Tensor]  # without autograd

# torch 2.13 renamed them
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def wait(work: dist.Work, group: dist.ProcessGroup | None) -> None:
    """Wait for an asynchronous collective; hang detection reads its `group` from this call's frame."""
    assert group is None or isinstance(group, dist.ProcessGroup)
    work.wait()


def gather_rows(x: Tensor, axis: Axis | JointAxis) -> Tensor:
    """Return the rows of all ranks along `axis`, one rank's after the other: (N, …) to (n N, …); without autograd."""
    gathered = x.new_empty(axis.size * len(x), *x.shape[1:])
    all_gather(gathered, x.contiguous(), group=axis.group)
    return gathered


def scatter_rows(x: Tensor, axis: Axis | JointAxis) -> Tensor:
    """Return this rank's rows of the sum over the ranks along `axis`: (n N, …) to (N, …); without autograd."""
    own_rows = x.new_empty(len(x) // axis.size, *x.shape[1:])
    reduce_scatter(own_rows, x.contiguous(), group=axis.group)
    return own_rows


def copy_to_tp(x: Tensor, axis: Axis) -> Tensor:
    """Forward: `x` itself. Backward: all-reduce the gradient, of which each rank has a partial sum."""
    return Collective.apply(x, axis, _identity, _all_reduce)


def reduce_from_tp(x: Tensor, axis: Axis) -> Tensor:
    """Forward: all-reduce the partial sums `x`. Backward: the gradient itself."""
    return Collective.apply(x, axis, _all_reduce, _identity)


def gather_from_sp(x: Tensor, axis: Axis) -> Tensor:
    """Forward: all-gather (B, T / n, D) to (B, T, D). Backward: reduce-scatter the gradient."""
    return Collective.apply(x, axis, _all_gather_sequence, _reduce_scatter_sequence)


def reduce_scatter_to_sp(x: Tensor, axis: Axis) -> Tensor:
    """Forward: reduce-scatter the partial sums (B, T, D) to (B, T / n, D). Backward: all-gather the gradient."""
    return Collective.apply(x, axis, _reduce_scatter_sequence, _all_gather_sequence)


class Collective(torch.autograd.Function):
    """Forward: `communicate(x, axis)`. Backward: `communicate_gradient(gradient, axis)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, communicate: Communicate, communicate_gradient: Communicate) -> Tensor:
        ctx.axis = axis
        ctx.communicate_gradient = communicate_gradient
        return communicate(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.communicate_gradient(grad, ctx.axis), None, None, None


def _identity(x: Tensor, _axis: Axis) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, axis: Axis) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)  # autograd may pass this tensor to other nodes
    dist.all_reduce(x, group=axis.group)
    return x


def _all_gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """All-gather (B, T / n, D) to (B, T, D): collectives concatenate along dimension 0, so it transposes the result."""
    parts = x.new_empty(axis.size, *x.shape)
    all_gather(parts.flatten(0, 1), x.contiguous(), group=axis.group)
    return parts.transpose(0, 1).flatten(1, 2)


def _reduce_scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Reduce-scatter (B, T, D) to this rank's (B, T / n, D) of the sum over ranks."""
    parts = x.unflatten(1, (axis.size, -1)).transpose(0, 1).contiguous()
    mine = torch.empty_like(parts[0])
    reduce_scatter(mine, parts.flatten(0, 1), group=axis.group)
    return mine
