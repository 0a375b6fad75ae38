"""Parallelize: split and shard a decoder over the ranks. Read this first: its steps are the files of this folder.

The decoder is plain single-device code; parallelism is applied to it from outside. It is split and sharded on the meta
device, so a rank only allocates the parameters that it holds.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from training.distributed.layout import ParallelConfig
from training.distributed.mesh import World
from training.kernels.precision import COMPUTE_DTYPES, accumulation_dtype
from training.memory.memory_config import MemoryConfig
from training.memory.offload_parameters import allocate_parameters
from training.memory.recompute import checkpoint_activations
from training.model.decoder import Decoder
from training.model.initialize import init_shard
from training.parallel.data_parallel import GradReducer
from training.parallel.fsdp import apply_fsdp
from training.parallel.gradients import remaining_reductions
from training.parallel.parallel_model import ParallelModel
from training.parallel.pipeline_stages import global_name, split_stages
from training.parallel.tensor_parallel import apply_tensor_parallel, is_replicated, tp_shards
from training.sharding.shard_spec import ShardSpec
from training.sharding.sharded_parameter import ShardedParameter


def parallelize(
    decoder: Decoder,
    layout: ParallelConfig,
    world: World,
    seed: int,
    precision: str = "fp32",
    memory: MemoryConfig = MemoryConfig(),
    compiled: bool = False,
) -> ParallelModel:
    """Build this rank's part of the model; collective: every rank calls it.

    `decoder` is the whole one, on the meta device; `layout` is resolved. Initial weights depend on `seed` and the
    parameters' names only, so every layout starts with the same.
    """
    dtype = COMPUTE_DTYPES[precision]
    parts, shards = shard_model(decoder, layout, world, dtype, memory, compiled)
    files = allocate_parameters(parts, memory, world.device, world.rank)
    reducers = [_grad_reducer(part, layout, world) for part in parts]
    pairs = zip(parts, reducers, strict=True)
    params = [p for part, reducer in pairs for p in _sharded_parameters(part, shards, world, reducer)]
    with torch.no_grad():
        for param in params:
            init_shard(param.local, param.name, param.spec, decoder.config, seed)
            if files is not None:
                files.after_load()
    reductions = remaining_reductions(layout, bool(decoder.config.tied), world)
    model = ParallelModel(decoder.config, layout, world, dtype, parts, params, reducers, reductions, files)
    model.publish_params()
    return model


def shard_model(
    decoder: Decoder,
    layout: ParallelConfig,
    world: World,
    dtype: torch.dtype = torch.float32,
    memory: MemoryConfig = MemoryConfig(),
    compiled: bool = False,
) -> tuple[list[Decoder], dict[str, ShardSpec]]:
    """Split, shard and wrap the decoder on the meta device: this rank's pipeline stages, or one decoder.

    `dtype` is the compute dtype. FSDP holds its shards in the accumulation dtype and gathers them in `dtype`; any other
    parameter is in `dtype`. Returns also this rank's tensor-parallel shard of every parameter, by name.
    """
    parts = split_stages(decoder, layout, world.axis("pp").rank)
    shards = tp_shards(decoder, world.axis("tp"))
    for part in parts:
        part.to(accumulation_dtype(dtype) if layout.zero == 3 else dtype)
        apply_tensor_parallel(part, shards, world.axis("tp"), layout.sequence_parallel)
        checkpoint_activations(part, memory.recompute)  # around the tensor-parallel modules
        if compiled:
            for block in part.blocks.values():  # of the same code, so torch compiles one and reuses it
                block.compile()  # includes recomputation, excludes FSDP's hooks
        if layout.zero == 3:
            apply_fsdp(part, layout, world, dtype, memory.parameters)  # last; ZeRO-0 to 2 need no wrapper
    return parts, shards


def _grad_reducer(part: Decoder, layout: ParallelConfig, world: World) -> GradReducer:
    plain = [p for p in part.parameters() if not isinstance(p, DTensor)]  # FSDP reduces the others
    reduce_dtype = torch.bfloat16 if layout.reduce_bf16 else None
    shard, replicate = world.axis("shard"), world.axis("replicate")
    return GradReducer(plain, shard, replicate, layout.zero, layout.micro_batches, reduce_dtype)


def _sharded_parameters(
    part: Decoder, shards: Mapping[str, ShardSpec], world: World, grad_reducer: GradReducer
) -> list[ShardedParameter]:
    """The shards of a part's parameters that this rank updates, and their place in the global tensors."""
    tp, shard, replicate = (world.axis(name) for name in ("tp", "shard", "replicate"))
    params = []
    for name, p in part.named_parameters():
        full_name = global_name(part, name)
        local = grad_reducer.own.get(id(p))
        if local is None:
            assert isinstance(p, DTensor)
            local = nn.Parameter(p.to_local(), requires_grad=False)
        spec = shards[full_name].shard(0, shard.size, shard.rank)
        assert spec.size == tuple(local.shape), (name, spec, local.shape)
        is_copy = replicate.rank > 0 or (is_replicated(full_name) and tp.rank > 0) or full_name != name
        params.append(ShardedParameter(full_name, p, local, spec, not is_copy))
    return params
