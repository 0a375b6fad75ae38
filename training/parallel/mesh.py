"""World: the ranks of a run, their device mesh, and this rank's place in it.

Mesh dimensions, outermost first: "pp", "replicate", "shard", "tp". Neighbouring ranks differ in "tp", which
communicates most (Narayanan et al. 2021, section 3). Data parallelism is "replicate" x "shard", as in FSDP's hybrid
sharding: ZeRO shards over the ranks along "shard" (`parallel.zero_group` of them), and the ranks along "replicate"
hold copies of the same shard.

Where tensor parallelism is 2D, 2.5D or 3D, "tp" is also a grid of its own axes "depth", "row" and "column". With
context parallelism neighbours on "replicate" x "shard" have parts of the same sequences: they are an axis "cp" of their
own, and for parameters replicas like others, over which gradients are summed and ZeRO shards.

For experts alone the ranks along "replicate" x "shard" are "expert_replicate" x "expert_shard" x "ep": neighbours along
"ep" have different experts. Without expert parallelism the first two are "replicate" and "shard" themselves.

With local steps (DiLoCo) "replicate" of the mesh is the axis "outer": its ranks hold different weights, which are
averaged at times; the axis "replicate" has one rank. The ranks of such a replica are neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from training.distributed.process_group import group_timeout
from training.parallel.experiment import experiment_of
from training.parallel.layout import Layout
from training.sharding.axis import Axes, Axis, JointAxis

AXES = ("pp", "replicate", "shard", "tp")
EXPERT_AXES = ("expert_replicate", "expert_shard")
OUTER = "outer"  # of replicas that take local steps


@dataclass(frozen=True)
class World:
    """This rank's view of the mesh: per-axis size, rank and group; its device; the collectives' timeout."""

    mesh: DeviceMesh
    axes: Axes
    device: torch.device
    timeout: timedelta
    expert_mesh: DeviceMesh
    """The ranks that have the same experts, "expert_replicate" x "expert_shard"; without expert parallelism `mesh`."""
    tp_axes: tuple[str, ...] = ("tp",)
    """The axes into which the tensor-parallel ranks are divided."""

    @property
    def rank(self) -> int:
        """Return the global rank."""
        return dist.get_rank()

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return dist.get_world_size()

    @property
    def is_main(self) -> bool:
        """Return True on rank 0, which prints and writes the files of the run."""
        return self.rank == 0

    def axis(self, name: str) -> Axis:
        """The axis "pp", "replicate", "shard", "tp", "cp" or "ep", one of a grid, or of the replicas of experts."""
        return self.axes[name]

    @property
    def outer(self) -> Axis:
        """Return the ranks with weights and gradients of their own, which take local steps.

        This one alone without them.
        """
        return self.axes.get(OUTER) or Axis(OUTER, 1, 0, None)

    def fsdp_mesh(self, of_experts: bool) -> DeviceMesh:
        """Return the ranks that FSDP shards over.

        In several groups (hybrid sharding) also those that hold the same shard.
        """
        mesh, names = (self.expert_mesh, EXPERT_AXES) if of_experts else (self.mesh, ("replicate", "shard"))
        return mesh[names] if self.axes[names[0]].size > 1 else mesh[names[1]]

    @property
    def finest_axes(self) -> tuple[str, ...]:
        """Return the axes of the mesh in order, with those into which "tp" is divided in its place."""
        return (*AXES[:-1], *self.tp_axes)

    def joint_axis(self, *names: str) -> JointAxis:
        """Several of the `finest_axes`, in their order, as one; collective if more than one has several ranks."""
        axes = tuple(self.axes[name] for name in names)
        longer = [axis for axis in axes if axis.size > 1]
        if len(longer) < 2:
            return JointAxis(axes, longer[0].group if longer else None)
        every = self.finest_axes
        dims = [every.index(name) for name in names]
        of_mesh = dict(zip(AXES, self.mesh.mesh.shape, strict=True))
        ranks = self.mesh.mesh.reshape([of_mesh.get(name) or self.axes[name].size for name in every])
        lines = ranks.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims)).flatten(0, -2).tolist()
        group = dist.new_subgroups_by_enumeration(lines, timeout=self.timeout, group_desc=" x ".join(names))[0]
        return JointAxis(axes, group)

    @property
    def dp_size(self) -> int:
        """Return the number of data-parallel replicas: of groups of ranks that read different sequences."""
        return self.outer.size * self.axes["replicate"].size * self.axes["shard"].size // self.axes["cp"].size

    @property
    def dp_rank(self) -> int:
        """Return the index of this rank's data-parallel replica.

        Of n that take local steps, replica r has r, r + n, r + 2n, …
        """
        shard = self.axes["shard"]
        replicate = self.axes["replicate"]
        rank = (replicate.rank * shard.size + shard.rank) // self.axes["cp"].size
        return rank * self.outer.size + self.outer.rank

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over all ranks, in place; on `self.device` or the CPU."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_reduce_max(self, value: int) -> int:
        """Return the maximum of `value` over all ranks; reduced on the CPU, so it does not wait for a GPU."""
        x = torch.tensor(value)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return int(x)


def build_world(layout: Layout, device: torch.device, timeout: float = 60.0) -> World:
    """Build the mesh of a resolved layout; collective: every rank calls it. `timeout` in seconds."""
    shape = layout.mesh_shape
    tp_axes = experiment_of(layout).tp_axes
    ranks = torch.arange(dist.get_world_size()).view(shape)
    if layout.local_replicas > 1:
        ranks = torch.arange(dist.get_world_size()).view(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    limit = group_timeout(device.type, timeout)
    # not init_device_mesh, whose groups always time out after 30 minutes
    groups = [_own_group(ranks, dim, name, limit) for dim, name in enumerate(AXES)]
    mesh = DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=AXES)
    axes = {name: _axis(mesh[name], name) for name in AXES}
    if layout.local_replicas > 1:
        axes |= {OUTER: replace(axes["replicate"], name=OUTER), "replicate": Axis("replicate", 1, 0, None)}
    if tp_axes:
        axes |= further_axes(tuple(tp_axes), ranks.reshape(-1, *tp_axes.values()), limit)
    neighbours = ranks.reshape(shape[0], -1, layout.cp, shape[-1]).transpose(2, 3).reshape(-1, layout.cp)
    axes |= further_axes(("cp",), neighbours, limit)
    of_experts = ranks.movedim(3, 1).reshape(-1, *layout.expert_mesh_shape)  # (…, replicate, shard, ep)
    axes |= further_axes(("ep",), of_experts.flatten(0, 2), limit)
    expert_mesh = mesh
    axes |= {"expert_replicate": axes["replicate"], "expert_shard": axes["shard"]}
    if layout.ep > 1:
        expert_mesh = _expert_mesh(of_experts.movedim(3, 1).flatten(0, 1), device, limit)
        axes |= {name: _axis(expert_mesh[name], name) for name in EXPERT_AXES}
    return World(mesh, axes, device, limit, expert_mesh, tuple(tp_axes) or ("tp",))


def _expert_mesh(ranks: Tensor, device: torch.device, timeout: timedelta) -> DeviceMesh:
    """Return the ranks that have the same experts as this one; `ranks` (groups, replicate, shard). Collective."""
    groups = [_own_group(ranks, dim, name, timeout) for dim, name in enumerate(EXPERT_AXES, 1)]
    (own,) = [group for group in ranks if (group == dist.get_rank()).any()]
    return DeviceMesh.from_group(groups, device.type, own, mesh_dim_names=EXPERT_AXES)


def further_axes(names: Sequence[str], ranks: Tensor, timeout: timedelta) -> dict[str, Axis]:
    """Return the axes of groups of ranks, (groups, ranks along each of the axes `names`); collective.

    A rank in none of the groups is alone along each axis.
    """
    coordinates = (ranks == dist.get_rank()).nonzero().tolist()
    axes = {}
    for dim, name in enumerate(names, 1):
        group = _own_group(ranks, dim, name, timeout) if ranks.shape[dim] > 1 else None
        axes[name] = Axis(name, ranks.shape[dim], coordinates[0][dim], group) if coordinates else Axis(name, 1, 0, None)
    return axes


def _own_group(ranks: Tensor, dim: int, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """Return this rank's group along a dimension of `ranks`; collective."""
    lines = ranks.movedim(dim, -1).flatten(0, -2).tolist()
    return dist.new_subgroups_by_enumeration(lines, timeout=timeout, group_desc=name)[0]


def _axis(line: DeviceMesh, name: str) -> Axis:
    return Axis(name, line.size(), line.get_local_rank(), line.get_group() if line.size() > 1 else None)
