"""Axis: one dimension of the mesh of ranks, as one rank sees it, or several as one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch.distributed as dist


@dataclass(frozen=True)
class Axis:
    """One mesh dimension from this rank's view: its size, this rank's index along it, and the process group along it.

    `group` is None where the size is 1.
    """

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup | None


Axes = Mapping[str, Axis]
"""The axes of a mesh, by name."""


@dataclass(frozen=True)
class JointAxis:
    """Several axes as one, the last of them innermost; `group` has the ranks along all of them.

    By default no axis: this rank alone. `group` is None where the size is 1.
    """

    axes: tuple[Axis, ...] = ()
    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return prod(axis.size for axis in self.axes)

    @property
    def rank(self) -> int:
        """Return this rank's index along the joint axis."""
        rank = 0
        for axis in self.axes:
            rank = rank * axis.size + axis.rank
        return rank

    def at(self, rank: int) -> Axes:
        """Return the axes as the rank of that index sees them, by name."""
        axes = {}
        for axis in reversed(self.axes):
            axes[axis.name] = replace(axis, rank=rank % axis.size)
            rank //= axis.size
        return axes
