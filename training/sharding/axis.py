"""Axis: one dimension of the mesh of ranks, as one rank sees it."""

from collections.abc import Mapping
from dataclasses import dataclass

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
