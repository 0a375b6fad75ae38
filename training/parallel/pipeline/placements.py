"""Placements: the embedding that is also the output matrix, on two pipeline stages."""

import torch.distributed as dist

from training.parallel.layout import Layout
from training.parallel.mesh import World
from training.sharding.axis import Axis
from training.sharding.placement import Placement

# Of an embedding that is also the output matrix, where these are two pipeline stages (Narayanan et al. 2021, section
# 3.2): "tied" are the ranks of the first and the last stage
TIED = Placement(replicated=("tied",), gradient_sum=("tied",))


def tied_axis(layout: Layout, world: World) -> Axis:
    """The axis "tied": the pipeline ranks of the first and the last stage; collective: every rank calls it.

    Of size 1 on the ranks of other stages, and where one rank has both.
    """
    axis, ranks = Axis("tied", 1, 0, None), world.mesh.mesh  # (pp, replicate, shard, tp)
    first, last = layout.stage_ranks[0], layout.stage_ranks[-1]
    if first == last:
        return axis
    for pair in zip(ranks[first].flatten().tolist(), ranks[last].flatten().tolist(), strict=True):
        # every rank must create every group
        group = dist.new_group(list(pair), timeout=world.timeout, group_desc="tied")
        axis = Axis("tied", 2, pair.index(world.rank), group) if world.rank in pair else axis
    return axis
