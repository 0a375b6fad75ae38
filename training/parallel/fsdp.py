"""ZeRO-3: parameters, too, are divided by rows, and gathered block by block as they are needed (torch's FSDP2)."""

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from training.distributed.mesh import World
from training.memory.memory_config import Place
from training.memory.offload_parameters import offload_policy
from training.model.decoder import Decoder


def apply_fsdp(part: Decoder, world: World, place: Place = "device") -> None:
    """Divide every parameter of a decoder, or a stage of one, over the replicas along "shard".

    `place` is where they are between uses.
    """
    hybrid = world.mesh["replicate"].size() > 1
    mesh = world.mesh["replicate", "shard"] if hybrid else world.mesh["shard"]
    for module in [*part.blocks.values(), part]:
        fully_shard(module, mesh=mesh, offload_policy=offload_policy(place))
        assert isinstance(module, FSDPModule)
        # gradients are to be summed, by a plain sum: gloo has no other
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def synchronize_gradients(part: nn.Module, enabled: bool) -> None:
    """Whether the coming backward pass ends with a sum over the replicas, or is added to by a later one."""
    if isinstance(part, FSDPModule):
        part.set_requires_gradient_sync(enabled)
