"""Options of a recording: where this rank's pieces of tensors lie, and what is recorded of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gristmill_parity.recording.placement import Box, Coordinates, Placement, coordinates_of_mesh

Place = Placement | Box | None
"""Where the values lie in the whole tensor; None: not recorded."""
PlacementRule = Callable[[str, str, Tensor], Place]
"""Returns the place of a tensor, from a module's or parameter's name, the tensor's kind and the tensor."""
Placements = Mapping[str, Place] | PlacementRule


@dataclass(frozen=True)
class RankLayout:
    """How the ranks of a run divide its tensors. DTensors say it themselves; one process needs none of this."""

    axes: Coordinates | DeviceMesh = field(default_factory=dict)
    """This rank's index along each axis of the mesh of ranks, and the axis's size: {"dp": (rank, 2)}. A DeviceMesh has
    them, too."""
    activations: Placement = field(default_factory=dict)
    """What the axes do to activations: {"dp": Shard(0)} where ranks have other sequences."""
    placements: Placements = field(default_factory=dict)
    """Tensors for which that is not so, by a pattern for "NAME KIND": {"head output": {"dp": Partial()}}. None: not
    recorded. The first pattern that fits counts. Or a function of name, kind and tensor."""
    micro_batches: int = 1
    """How often a module is called in a step, each time with further sequences of the batch."""
    mean_over: Sequence[str] = ()
    """Axes whose ranks take the mean loss of their own sequences and then average gradients, as DDP and FSDP do."""
    rank: int | None = None
    """This rank's number; by default of the default process group, else 0."""
    ranks: int | None = None
    """The number of ranks; by default of the default process group, else 1."""

    def coordinates(self, parts: Sequence[nn.Module]) -> dict[str, tuple[int, int]]:
        """Return this rank's place along each axis, with those of the meshes that a model's DTensors are on."""
        own = coordinates_of_mesh(self.axes) if isinstance(self.axes, DeviceMesh) else dict(self.axes)
        for part in parts:
            for parameter in part.parameters():
                if isinstance(parameter, DTensor):
                    own = {**coordinates_of_mesh(parameter.device_mesh), **own}
        return own

    def rank_and_size(self) -> tuple[int, int]:
        """Return this rank's number, and that of ranks."""
        is_given = self.rank is not None or self.ranks is not None
        if not is_given and dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return self.rank or 0, self.ranks or 1


@dataclass(frozen=True)
class RecordOptions:
    """Choice of what is recorded, and under which names."""

    names: Sequence[str] = ("*",)
    """Patterns of the modules and parameters to record."""
    keep: Literal["auto", "all", "nothing"] | Sequence[str] = "auto"
    """Which values are kept whole, besides hash and sketch: "all", "nothing", or patterns for "NAME KIND". By default
    all of a model of up to 32 MiB, and none of a larger one."""
    loss_scale: float = 1.0
    """Factor of the loss in the backward pass, which gradients are divided by."""
    rename: Callable[[str], str] = str
    """Returns a module's or parameter's name on the other side, from its name here."""
    leave_out: tuple[type[nn.Module], ...] = ()
    """Classes of modules that are not recorded: those that stand for a module of another rank."""
