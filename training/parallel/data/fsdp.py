"""ZeRO-3: torch's FSDP2 shards the parameters and all-gathers them unit by unit (Zhao et al. 2023).

The units are the embedding, each block, and the last norm with the output matrix; where the output matrix is the
embedding, what lies outside the blocks is one unit. While a unit is computed, the next one is gathered.
"""

from itertools import pairwise

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from training.kernels.precision import accumulation_dtype
from training.memory.memory_config import OffloadTarget
from training.memory.offload_parameters import offload_policy
from training.model.decoder import Decoder
from training.model.embedding import Embedding, Head
from training.model.sparse_mlp import SparseMLP
from training.parallel.layout import Layout
from training.parallel.mesh import World


def apply_fsdp(
    part: Decoder, layout: Layout, world: World, dtype: torch.dtype, offload: OffloadTarget = "device"
) -> None:
    """Shard every parameter of a decoder, or a pipeline stage of one, by rows over the "shard" axis; in place.

    Parameters become DTensors in the accumulation dtype of `dtype`, which are gathered in `dtype`. `offload`: their
    storage between uses. With several groups (hybrid sharding) gradients are also all-reduced over "replicate".
    Gradients are reduce-scattered after each micro-batch. A unit is freed after its forward pass, but for the last one,
    whose backward pass follows; a pipeline gathers each unit once a step, instead of for every micro-batch.
    """
    low = dtype != accumulation_dtype(dtype)
    # inputs are not cast: the rotation angles among them are float32
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if low else None,
        reduce_dtype=(torch.bfloat16 if layout.reduce_bf16 else accumulation_dtype(dtype)) if low else None,
        cast_forward_inputs=False,
    )
    units = _units(part)
    of_experts: list[list[nn.Module]] = []
    if layout.ep > 1:
        of_experts = [[b.mlp.experts] for b in part.blocks.values() if isinstance(b.mlp, SparseMLP)]
    every: list[list[nn.Module]] = [*of_experts, *units, [part]]
    for modules in every:
        keep = layout.pipeline is not None or modules[-1] in (part.head, part)
        mesh = world.fsdp_mesh(modules in of_experts)
        fully_shard(
            modules, mesh=mesh, reshard_after_forward=not keep, mp_policy=policy, offload_policy=offload_policy(offload)
        )
        unit = _fsdp(modules[0])
        # sum gradients instead of averaging them: the loss is divided by the global count, and gloo can only sum
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    if [part.embed] in units:
        _fsdp(part.embed).set_unshard_in_backward(False)  # a lookup's gradient does not depend on the weights
    for modules, following in pairwise(units):
        _fsdp(modules[0]).set_modules_to_forward_prefetch([_fsdp(following[0])])
    if layout.pipeline is not None:
        # torch's stages switch the reduction off until the last micro-batch, and keep full gradients until then
        part.set_requires_gradient_sync = lambda *_, **__: None  # type: ignore[assignment]


def reshard(part: nn.Module) -> None:
    """Free the gathered parameters that are kept for a backward pass; no-op without FSDP."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _units(part: Decoder) -> list[list[nn.Module]]:
    """Return the modules of each unit, in the order of use, without the root."""
    blocks: list[list[nn.Module]] = [[block] for block in part.blocks.values()]
    first: list[list[nn.Module]] = [[part.embed]] if isinstance(part.embed, Embedding) else []
    last: list[list[nn.Module]] = [[part.norm, part.head]] if isinstance(part.head, Head) else []
    return blocks if part.config.tied and first and last else [*first, *blocks, *last]


def _fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
