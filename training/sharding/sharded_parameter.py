"""ShardedParameter: a parameter on one rank."""

from dataclasses import dataclass, field

from torch import nn

from training.sharding.placement import Placement
from training.sharding.shard_spec import ShardSpec


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter, the shard of it that this rank updates and stores, and the shard's place in the global tensor."""

    name: str
    """Name in the unsharded model; tied copies on several pipeline stages share it."""
    module_param: nn.Parameter
    """The module's parameter, which the forward pass uses: sharded by tensor parallelism only, or FSDP's DTensor."""
    local: nn.Parameter
    """Shard that this rank updates and stores: `module_param` itself, or its rows under ZeRO; in mixed precision the
    float32 master weights of a 16-bit `module_param`. A plain tensor with a plain gradient; owns its memory or is a
    view of `module_param`."""
    spec: ShardSpec
    """Offset and size of `local` in the global tensor."""
    is_primary: bool
    """True on exactly one of the ranks that hold this shard: norms count the shard there and nowhere else."""
    placement: Placement = field(default_factory=Placement)
    """The ranks that hold the shard, and those over which its gradient is summed; by default this rank alone."""

    @property
    def matrix_placement(self) -> Placement:
        """Return the placement of the matrix; of experts' that of each, without the axes that divide experts."""
        placement = self.placement
        for axis, dim in placement.shard.items():
            if dim < len(self.spec.global_shape) - 2:
                placement = placement.without(axis)
        return placement
