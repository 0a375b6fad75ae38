"""Parallelize: split and shard a decoder over the ranks. Read this first: its steps are the files of this folder.

The decoder is plain single-device code; parallelism is applied to it from outside. It is split and sharded on the meta
device, so a rank only allocates the parameters of its own.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from training.kernels.precision import COMPUTE_DTYPES, accumulation_dtype
from training.memory.memory_config import MemoryConfig
from training.memory.offload_parameters import allocate_parameters
from training.memory.recompute import checkpoint_activations
from training.model.block import Block
from training.model.decoder import Decoder
from training.model.sparse_mlp import SparseMLP
from training.parallel.context.context_parallel import apply_context
from training.parallel.context.tokens import TokenOrder
from training.parallel.data.fsdp import apply_fsdp
from training.parallel.data.grad_reducer import GradBucket, GradReducer
from training.parallel.experiment import experiment_of
from training.parallel.expert.dispatch import apply_expert_parallel
from training.parallel.expert.options import is_expert
from training.parallel.expert.routing import Routing
from training.parallel.gradients import RemainingSums
from training.parallel.initialize import InitialValues
from training.parallel.layout import Layout
from training.parallel.mesh import World, further_axes
from training.parallel.parallel_model import ParallelModel
from training.parallel.pipeline.pipeline_stages import global_name, split_stages
from training.parallel.placement_table import placement_table
from training.parallel.tensor.placements import KV
from training.parallel.tensor.tensor_parallel import apply_tensor_parallel
from training.sharding.axis import Axes
from training.sharding.placement import Placement
from training.sharding.sharded_parameter import ShardedParameter


def parallelize(
    decoder: Decoder,
    layout: Layout,
    world: World,
    seed: int,
    precision: str = "fp32",
    memory: MemoryConfig = MemoryConfig(),
    compiled: bool = False,
    seq_len: int | None = None,
    before_allocation: Callable[[int, int], object] = lambda *_: None,
) -> ParallelModel:
    """Build this rank's part of the model; collective: every rank calls it.

    `decoder` is unsplit, on the meta device; `layout` is resolved; `seq_len`: tokens of a training sequence, for
    which pipeline stages are balanced; by default the context. Initial weights depend on `seed` and the
    parameters' names only, so every layout starts with the same. `before_allocation` is called with the number of this
    rank's parameters, before ZeRO shards them, and of those that it updates, and may raise.
    """
    dtype = COMPUTE_DTYPES[precision]
    parts = shard_model(decoder, layout, world, dtype, memory, compiled, seq_len)
    table = placement_table(decoder, layout)
    before_allocation(*_counts(decoder, parts, table, world))
    files = allocate_parameters(parts, memory, world.device, world.rank)
    routing = Routing.of(parts, world, TokenOrder.of(layout, world))
    axes = _axes_of(decoder, table, layout, world)
    reducers = [_grad_reducer(part, layout, table, axes, seed) for part in parts]
    params = _sharded_parameters(decoder, parts, reducers, table, axes)
    initial = InitialValues(decoder, seed)
    with torch.no_grad():
        for param in params:
            initial.fill(param.local, param.name, param.spec)
            if files is not None:
                files.drop_pages()
    for part, reducer in zip(parts, reducers, strict=True):
        # compiled blocks contain their hooks: they are waited for together
        reducer.all_gather_before_use([part] if compiled else [part.embed, *part.blocks.values(), part.norm, part.head])
    sums = RemainingSums(params, axes)
    pipeline = None
    if layout.pipeline is not None:
        from training.parallel.pipeline.pipeline_parallel import Pipeline  # takes a second to import

        pipeline = Pipeline(parts, reducers, layout, world.axis("pp"), world.device, dtype)
    model = ParallelModel(decoder.config, layout, world, parts, params, reducers, axes, sums, pipeline, files, routing)
    model.all_gather_params()
    return model


def _counts(
    decoder: Decoder, parts: Sequence[Decoder], table: Mapping[str, Placement], world: World
) -> tuple[int, int]:
    """Return the parameters of this rank, before ZeRO shards them, and those that it updates."""
    shapes = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
    held = [(global_name(part, name), p) for part in parts for name, p in part.named_parameters()]
    own = sum(table[name].piece(shapes[name], world.axes).numel for name, _ in held)
    return sum(p.numel() for _, p in held), own


def shard_model(
    decoder: Decoder,
    layout: Layout,
    world: World,
    dtype: torch.dtype = torch.float32,
    memory: MemoryConfig = MemoryConfig(),
    compiled: bool = False,
    seq_len: int | None = None,
) -> list[Decoder]:
    """Split, shard and wrap the decoder on the meta device: this rank's pipeline stages, or one decoder.

    `dtype` is the compute dtype. FSDP keeps its shards in the accumulation dtype and gathers them in `dtype`; any other
    parameter is in `dtype`.
    """
    parts = split_stages(decoder, layout, world.axis("pp").rank, seq_len or decoder.config.context)
    # what this rank computes with of each parameter: the pieces before ZeRO shards their rows
    table = placement_table(decoder, layout)
    pieces = {
        name: table[name].without("shard").without("expert_shard").piece(tuple(p.shape), world.axes)
        for name, p in decoder.named_parameters(remove_duplicate=False)
    }
    for part in parts:
        part.to(accumulation_dtype(dtype) if layout.shards_parameters else dtype)
        apply_expert_parallel(part, pieces, world.axis("ep"))
        if not experiment_of(layout).shard_modules(part, pieces, world.axes):
            apply_tensor_parallel(part, pieces, world.axis("tp"), layout.sequence_parallel)
        apply_context(part, layout, TokenOrder.of(layout, world), compiled)
        checkpoint_activations(part, memory.recompute)  # around the tensor-parallel modules
        if compiled:
            _compile_blocks(part)  # includes recomputation, excludes FSDP's hooks
        if layout.shards_parameters:
            apply_fsdp(part, layout, world, dtype, memory.parameters)  # last; ZeRO-0 to 2 need no wrapper
    return parts


def _compile_blocks(part: Decoder) -> None:
    """Compile each block in place: around experts, whose numbers of tokens differ in each step, and around sinks."""
    for block in part.blocks.values():  # of the same code, so torch compiles one and reuses it
        assert isinstance(block, Block)
        if isinstance(block.mlp, SparseMLP):
            block.mlp.forward = torch.compiler.disable(block.mlp.forward)  # type: ignore[method-assign]
        if block.attention.sinks is not None:
            block.attention.attend = torch.compiler.disable(block.attention.attend)
        block.compile()


def _axes_of(decoder: Decoder, table: Mapping[str, Placement], layout: Layout, world: World) -> Axes:
    """Return the axes of the world and those of some parameters alone; collective."""
    axes = dict(world.axes)
    if decoder.config.tied:
        ends = sorted({layout.stage_ranks[0], layout.stage_ranks[-1]})
        axes |= further_axes(("tied",), world.mesh.mesh[ends].flatten(1).T, world.timeout)
    if any(KV in placement.replicated for placement in table.values()):
        neighbours = world.mesh.mesh.reshape(-1, layout.kv_copies(decoder.config))
        axes |= further_axes((KV,), neighbours, world.timeout)
    return axes


def _grad_reducer(part: Decoder, layout: Layout, table: Mapping[str, Placement], axes: Axes, seed: int) -> GradReducer:
    plain = [p for p in part.parameters() if not isinstance(p, DTensor)]  # FSDP reduces the others
    reduce_dtype = torch.bfloat16 if layout.reduce_bf16 else None
    bucket = experiment_of(layout).make_bucket(part, table, axes, seed) or GradBucket
    replicas = (axes["shard"], axes["replicate"])
    of_experts = (axes["expert_shard"], axes["expert_replicate"])
    others = {id(p): of_experts for name, p in part.named_parameters() if is_expert(name)}
    return GradReducer(plain, *replicas, layout.zero, layout.micro_batches, reduce_dtype, bucket, others)


def _sharded_parameters(
    decoder: Decoder,
    parts: Sequence[Decoder],
    reducers: Sequence[GradReducer],
    table: Mapping[str, Placement],
    axes: Axes,
) -> list[ShardedParameter]:
    """Return the shards of the parts' parameters that this rank updates, placed as the table says."""
    shapes = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
    params = []
    seen = set[str]()
    for part, reducer in zip(parts, reducers, strict=True):
        for local_name, p in part.named_parameters():
            name = global_name(part, local_name)
            spec = table[name].piece(shapes[name], axes)
            local = nn.Parameter(p.to_local(), requires_grad=False) if isinstance(p, DTensor) else reducer.own[id(p)]
            assert spec.size == tuple(local.shape), (name, spec, local.shape)
            primary = name not in seen and table[name].is_primary(axes)  # one of two tied copies on one rank
            params.append(ShardedParameter(name, p, local, spec, primary, table[name]))
            seen.add(name)
    return params
