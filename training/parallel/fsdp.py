"""ZeRO-3: torch's FSDP2 shards the parameters and all-gathers them block by block (Zhao et al. 2023)."""

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from training.distributed.mesh import World
from training.memory.memory_config import OffloadTarget
from training.memory.offload_parameters import offload_policy
from training.model.decoder import Decoder


def apply_fsdp(part: Decoder, world: World, offload: OffloadTarget = "device") -> None:
    """Shard every parameter of a decoder, or a pipeline stage of one, by rows over the "shard" axis; in place.

    Parameters become DTensors. `offload`: their storage between uses. With several groups (hybrid sharding)
    gradients are also all-reduced over "replicate".
    """
    hybrid = world.mesh["replicate"].size() > 1
    mesh = world.mesh["replicate", "shard"] if hybrid else world.mesh["shard"]
    for module in [*part.blocks.values(), part]:
        fully_shard(module, mesh=mesh, offload_policy=offload_policy(offload))
        assert isinstance(module, FSDPModule)
        # sum gradients instead of averaging them: the loss is divided by the global count, and gloo can only sum
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def set_fsdp_grad_sync(part: nn.Module, enabled: bool) -> None:
    """Set whether the next backward pass reduce-scatters gradients or only accumulates them; no-op without FSDP."""
    if isinstance(part, FSDPModule):
        part.set_requires_gradient_sync(enabled)
