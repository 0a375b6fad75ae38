"""Gradients after the backward pass: the sums that data parallelism leaves, gradient norm, scaling."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from training.parallel.data.placements import DATA_PARALLEL
from training.parallel.expert.placements import EXPERT_PARALLEL
from training.sharding.axis import Axes
from training.sharding.sharded_parameter import ShardedParameter


class RemainingSums:
    """The gradient sums that data parallelism leaves, as the parameters' placements say.

    Tied copies on one rank are added; the others are all-reduced, in one call for each axis.
    """

    def __init__(self, params: Sequence[ShardedParameter], axes: Axes) -> None:
        names = set[str]()
        for p in params:
            names.update(p.placement.gradient_sum)
        names -= {*DATA_PARALLEL.gradient_sum, *EXPERT_PARALLEL.gradient_sum}
        self._all_reduced = [
            (axes[name].group, [p for p in params if name in p.placement.gradient_sum])
            for name in sorted(names)  # collectives must match on all ranks
            if axes[name].size > 1
        ]
        tied = [p for p in params if "tied" in p.placement.gradient_sum]
        self._copies = tied if len(tied) == 2 else []

    def run(self) -> None:
        """Sum the gradients of the shards that this rank updates, in place, after the backward pass."""
        _add_copies([p.local.grad for p in self._copies if p.local.grad is not None])
        for group, params in self._all_reduced:
            all_reduce_as_one([p.local.grad for p in params if p.local.grad is not None], group)


def all_reduce_as_one(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum tensors of one dtype over the ranks of a group, in place, in one call; none without tensors."""
    if not tensors:
        return
    flat = torch.cat([x.flatten() for x in tensors])
    dist.all_reduce(flat, group=group)
    for x, values in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
        x.copy_(values.view_as(x))


def _add_copies(grads: list[Tensor]) -> None:
    """Give each of several gradients their sum."""
    for grad in grads[1:]:
        grads[0] += grad
    for grad in grads[1:]:
        grad.copy_(grads[0])


def squared_grad_norm(params: Sequence[ShardedParameter], device: torch.device) -> Tensor:
    """This rank's part of the squared 2-norm of all gradients, 0-d float64: the sum over ranks is the global one."""
    grads = [p.local.grad for p in params if p.is_primary and p.local.grad is not None and p.local.numel()]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    # one norm per row, then float64: a float32 sum over a million elements is wrong in the fifth digit, and differs
    # between layouts
    rows = [torch.linalg.vector_norm(g, dim=-1).view(-1) for g in grads]
    return torch.cat(rows).double().square().sum().to(device)


def scale_gradients(params: Sequence[ShardedParameter], factor: float) -> None:
    """Multiply the gradients of the shards that this rank updates by `factor`, in place."""
    grads = [p.local.grad for p in params if p.local.grad is not None and p.local.numel()]
    if grads and factor != 1.0:
        torch._foreach_mul_(grads, factor)
