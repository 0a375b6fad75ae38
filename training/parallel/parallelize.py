"""Parallelize: split and shard a decoder over the ranks. Read this first: its steps are the files of this folder.

The decoder is plain single-device code; parallelism is applied to it from outside. It is split and sharded on the meta
device, so a rank only allocates the parameters that it holds.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from training.distributed.layout import ParallelConfig
from training.distributed.mesh import World
from training.memory.memory_config import MemoryConfig
from training.memory.offload_parameters import ParametersOnDisk
from training.memory.recompute import checkpoint_activations
from training.model.decoder import Decoder
from training.model.initialize import init_shard
from training.model.model_config import ModelConfig
from training.parallel.data_parallel import GradReducer
from training.parallel.fsdp import apply_fsdp
from training.parallel.gradients import remaining_reductions
from training.parallel.parallel_model import ParallelModel
from training.parallel.pipeline_stages import global_name, split_stages
from training.parallel.tensor_parallel import apply_tensor_parallel, is_replicated, tp_shard
from training.sharding.sharded_parameter import ShardedParameter


def parallelize(
    config: ModelConfig,
    layout: ParallelConfig,
    world: World,
    seed: int,
    precision: str = "fp32",
    memory: MemoryConfig = MemoryConfig(),
    compiled: bool = False,
) -> ParallelModel:
    """Build this rank's part of the model; collective: every rank calls it.

    `config` and `layout` are resolved. Initial weights depend on `seed` and the parameters' names only, so every
    layout starts with the same.
    """
    dtype = torch.float64 if precision == "fp64" else torch.float32
    parts = shard_model(config, layout, world, dtype, memory, compiled)
    files = _allocate(parts, world, memory)
    plain = [p for part in parts for p in part.parameters() if not isinstance(p, DTensor)]  # FSDP reduces the others
    grad_reducer = GradReducer(plain, world.axis("shard"), world.axis("replicate"), layout.zero)
    params = [p for part in parts for p in _sharded_parameters(config, part, world, grad_reducer)]
    reductions = remaining_reductions(layout, bool(config.tied), world)
    model = ParallelModel(config, layout, world, precision, parts, params, grad_reducer, reductions, files)
    with torch.no_grad():
        for param in params:
            init_shard(param.local, param.name, param.spec, config, seed)
            model.after_load()
    model.all_gather_params()
    return model


def shard_model(
    config: ModelConfig,
    layout: ParallelConfig,
    world: World,
    dtype: torch.dtype = torch.float32,
    memory: MemoryConfig = MemoryConfig(),
    compiled: bool = False,
) -> list[Decoder]:
    """Split, shard and wrap the model on the meta device: this rank's pipeline stages, or one decoder."""
    parts = split_stages(config, layout, world.axis("pp").rank)
    for part in parts:
        part.to(dtype)
        apply_tensor_parallel(part, world.axis("tp"), layout.sequence_parallel)
        checkpoint_activations(part, memory.recompute)  # around the tensor-parallel modules
        if compiled:
            compile_blocks(part)  # includes recomputation, excludes FSDP's hooks
        if layout.zero == 3:
            apply_fsdp(part, world, memory.parameters)  # last; ZeRO-0 to 2 need no wrapper
    return parts


def compile_blocks(part: Decoder) -> None:
    """Compile block by block: blocks have the same code, so torch compiles one and reuses it."""
    for block in part.blocks.values():
        block.compile()


def _allocate(parts: list[Decoder], world: World, memory: MemoryConfig) -> ParametersOnDisk | None:
    """Allocate the parameters, uninitialized; returns the files that hold them with memory.parameters "disk"."""
    files = None
    if memory.parameters == "disk":
        assert memory.folder is not None, "the caller chooses the folder"
        files = ParametersOnDisk(memory.folder, world.rank)
    for part in parts:
        if files is not None:
            files.materialize(part)
        else:
            part.to_empty(device=world.device if memory.parameters == "device" else "cpu")
        part.tie()  # to_empty allocates tied matrices separately
    return files


def _sharded_parameters(
    config: ModelConfig, part: Decoder, world: World, grad_reducer: GradReducer
) -> list[ShardedParameter]:
    """The shards of a part's parameters that this rank updates, and their place in the global tensors."""
    tp, shard, replicate = (world.axis(name) for name in ("tp", "shard", "replicate"))
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in Decoder(config).named_parameters()}
    params = []
    for name, p in part.named_parameters():
        full_name = global_name(part, name)
        local = grad_reducer.own.get(id(p))
        if local is None:
            assert isinstance(p, DTensor)
            local = nn.Parameter(p.to_local(), requires_grad=False)
        spec = tp_shard(full_name, shapes[full_name], tp).shard(0, shard.size, shard.rank)
        assert spec.size == tuple(local.shape), (name, spec, local.shape)
        is_copy = replicate.rank > 0 or (is_replicated(full_name) and tp.rank > 0) or full_name != name
        params.append(ShardedParameter(full_name, p, local, spec, not is_copy))
    return params
