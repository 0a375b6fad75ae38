"""Gradients after the backward pass: what has still to be summed, how long they are, and how they are scaled."""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from training.distributed.layout import ParallelConfig
from training.distributed.mesh import World
from training.parallel.pipeline_stages import stage_owner
from training.parallel.tensor_parallel import is_replicated
from training.sharding.sharded_parameter import ShardedParameter

Summation = Callable[[Sequence[ShardedParameter]], None]


def summations(layout: ParallelConfig, tied: bool, world: World) -> list[Summation]:
    """What a layout leaves to be summed when the replicas' gradients have been; every process calls it."""
    found: list[Summation] = []
    if layout.sequence_parallel:
        group = world.axis("tp").group
        found.append(lambda params: _sum_over(group, [p for p in params if is_replicated(p.name)]))
    if tied and layout.pp > 1:
        ends = (stage_owner(layout, 0), stage_owner(layout, layout.stages - 1))
        if ends[0] == ends[1]:
            found.append(_sum_copies)
        else:
            found.append(_sum_tied(world, ends))
    return found


def _sum_tied(world: World, ends: tuple[int, int]) -> Summation:
    """The embedding is also the output matrix, which another process has: their gradients are summed."""
    mine, ranks = None, world.mesh.mesh  # (pp, replicate, shard, tp)
    for pair in zip(ranks[ends[0]].flatten().tolist(), ranks[ends[1]].flatten().tolist(), strict=True):
        group = dist.new_group(
            list(pair), timeout=world.timeout, group_desc="tied embedding"
        )  # every process makes all
        mine = group if world.rank in pair else mine

    def sum_tied(params: Sequence[ShardedParameter]) -> None:
        if mine is not None:
            _sum_over(mine, [p for p in params if p.name == "embed.tokens.weight"])

    return sum_tied


def _sum_over(group: dist.ProcessGroup | None, params: Sequence[ShardedParameter]) -> None:
    grads = [p.local.grad for p in params if p.local.grad is not None]
    for _, alike in groupby(grads, key=lambda g: g.dtype):
        parts = list(alike)
        flat = torch.cat([g.flatten() for g in parts])
        dist.all_reduce(flat, group=group)
        for grad, values in zip(parts, flat.split([g.numel() for g in parts]), strict=True):
            grad.copy_(values.view_as(grad))


def _sum_copies(params: Sequence[ShardedParameter]) -> None:
    """Both stages lie here, each with a copy."""
    copies = [p.local for p in params if p.name == "embed.tokens.weight"]
    if len(copies) == 2 and copies[0].grad is not None and copies[1].grad is not None:
        copies[0].grad += copies[1].grad
        copies[1].grad.copy_(copies[0].grad)


def squared_norm(params: Sequence[ShardedParameter], device: torch.device) -> Tensor:
    """This process's part of the squared 2-norm of all gradients, float64, 0-d: each number is counted on one."""
    grads = [p.local.grad for p in params if p.is_primary and p.local.grad is not None and p.local.numel()]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    # row by row, and float64 from there: over a million elements float32 loses the fifth digit, and not the same one
    # in every layout
    rows = [torch.linalg.vector_norm(g, dim=-1).view(-1) for g in grads]
    return torch.cat(rows).double().square().sum().to(device)


def scale_gradients(params: Sequence[ShardedParameter], factor: float) -> None:
    """Multiply all gradients that are updated by."""
    grads = [p.local.grad for p in params if p.local.grad is not None and p.local.numel()]
    if grads and factor != 1.0:
        torch._foreach_mul_(grads, factor)
