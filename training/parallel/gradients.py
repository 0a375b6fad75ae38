"""Gradients after the backward pass: remaining reductions, gradient norm, scaling."""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from training.distributed.layout import ParallelConfig
from training.distributed.mesh import World
from training.parallel.tensor_parallel import is_replicated
from training.sharding.sharded_parameter import ShardedParameter

Reduction = Callable[[Sequence[ShardedParameter]], None]


def remaining_reductions(layout: ParallelConfig, tied: bool, world: World) -> list[Reduction]:
    """List the gradient reductions that follow data parallelism's; collective: every rank calls it.

    - Sequence parallelism: replicated parameters' gradients are partial sums, all-reduced over "tp" in one call.
    - A tied embedding on the first and the last pipeline stage: the copies' gradients are summed (Narayanan et al.
      2021, section 3.2), by an all-reduce between two ranks, or locally where one rank has both stages.
    """
    reductions: list[Reduction] = []
    if layout.sequence_parallel:
        group = world.axis("tp").group
        reductions.append(lambda params: _all_reduce_grads(group, [p for p in params if is_replicated(p.name)]))
    if tied and layout.pp > 1:
        ends = (layout.stage_ranks[0], layout.stage_ranks[-1])
        reductions.append(_sum_local_copies if ends[0] == ends[1] else _tied_embedding_reduction(world, ends))
    return reductions


def _tied_embedding_reduction(world: World, ends: tuple[int, int]) -> Reduction:
    """All-reduce the embedding's gradient between the pipeline ranks `ends` of the first and the last stage."""
    mine, ranks = None, world.mesh.mesh  # (pp, replicate, shard, tp)
    for pair in zip(ranks[ends[0]].flatten().tolist(), ranks[ends[1]].flatten().tolist(), strict=True):
        # every rank must create every group
        group = dist.new_group(list(pair), timeout=world.timeout, group_desc="tied embedding")
        mine = group if world.rank in pair else mine

    def reduce_tied(params: Sequence[ShardedParameter]) -> None:
        if mine is not None:
            _all_reduce_grads(mine, [p for p in params if p.name == "embed.tokens.weight"])

    return reduce_tied


def _all_reduce_grads(group: dist.ProcessGroup | None, params: Sequence[ShardedParameter]) -> None:
    """All-reduce the parameters' gradients in place, in one flat buffer per dtype."""
    grads = [p.local.grad for p in params if p.local.grad is not None]
    for _, same_dtype in groupby(grads, key=lambda g: g.dtype):
        parts = list(same_dtype)
        flat = torch.cat([g.flatten() for g in parts])
        dist.all_reduce(flat, group=group)
        for grad, values in zip(parts, flat.split([g.numel() for g in parts]), strict=True):
            grad.copy_(values.view_as(grad))


def _sum_local_copies(params: Sequence[ShardedParameter]) -> None:
    """Give both copies of the tied embedding on this rank the sum of their gradients."""
    copies = [p.local for p in params if p.name == "embed.tokens.weight"]
    if len(copies) == 2 and copies[0].grad is not None and copies[1].grad is not None:
        copies[0].grad += copies[1].grad
        copies[1].grad.copy_(copies[0].grad)


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
