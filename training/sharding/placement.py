"""Placement: the piece of a parameter that each rank of the mesh has, and the axes its gradient is summed over."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from training.sharding.axis import Axes
from training.sharding.shard_spec import ShardSpec


@dataclass(frozen=True)
class Placement:
    """A parameter on the mesh, by names of axes; plain data, from which the methods derive what a rank has to do.

    In DTensor's terms the parameter is Shard(dim) along the axes of `shard` and Replicate along `replicated`, and its
    gradient is Partial along `gradient_sum` after the backward pass. An axis is in one of the first two, or in neither
    where a single rank along it has the parameter, as pipeline stages do.
    """

    shard: Mapping[str, int] = field(default_factory=dict)
    """Axis: the dimension that its ranks split. Each axis splits the pieces of those before it: two axes may split two
    dimensions, or one of them twice."""
    replicated: tuple[str, ...] = ()
    """Axes along which every rank has the same piece."""
    gradient_sum: tuple[str, ...] = ()
    """Axes along which the ranks' gradients are terms of a sum, as each rank computes with other activations. The sum
    is reduce-scattered along an axis of `shard`, and all-reduced along one that is `replicated`."""
    repeat: Mapping[str, int] = field(default_factory=dict)
    """Axis of `shard`: how many neighbours along it have the same piece. They are an axis of `replicated`, too."""

    def __post_init__(self) -> None:
        assert not self.shard.keys() & set(self.replicated), f"{self} is both sharded and replicated along an axis"
        unknown = set(self.gradient_sum) - self.shard.keys() - set(self.replicated)
        assert not unknown, f"a gradient is summed over {unknown}, along which {self} is not placed"

    def __or__(self, other: "Placement") -> "Placement":
        """Place the pieces of this placement along the axes of another one, too."""
        twice = {*self.shard, *self.replicated} & {*other.shard, *other.replicated}
        assert not twice, f"{self} and {other} place a parameter twice along {twice}"
        return Placement(
            {**self.shard, **other.shard},
            self.replicated + other.replicated,
            self.gradient_sum + other.gradient_sum,
            {**self.repeat, **other.repeat},
        )

    def without(self, axis: str) -> "Placement":
        """Return the placement of what the ranks along `axis` hold together."""
        return Placement(
            {name: dim for name, dim in self.shard.items() if name != axis},
            tuple(name for name in self.replicated if name != axis),
            tuple(name for name in self.gradient_sum if name != axis),
            {name: count for name, count in self.repeat.items() if name != axis},
        )

    def piece(self, shape: tuple[int, ...], axes: Axes) -> ShardSpec:
        """Return this rank's piece of a parameter whose global shape is `shape`: its box in checkpoints."""
        spec = ShardSpec.whole(shape)
        for name, dim in self.shard.items():
            copies = self.repeat.get(name, 1)
            spec = spec.shard(dim, axes[name].size // copies, axes[name].rank // copies)
        return spec

    def is_primary(self, axes: Axes) -> bool:
        """Return True on exactly one of the ranks that hold the same piece: the one where a norm counts it."""
        return all(axes[name].rank == 0 for name in self.replicated)

    def copies(self, axes: Axes) -> int:
        """Return the number of ranks that hold the same piece, and must hold the same values."""
        return math.prod(axes[name].size for name in self.replicated)
