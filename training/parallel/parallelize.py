"""How a model is spread over the processes: read this first.

The model knows nothing of it. Whatever splits the model comes before what replicates it, and all of it
before there is memory for a single weight: each process makes only what it holds.
"""

import torch

from training.distributed.layout import ParallelConfig
from training.distributed.mesh import World
from training.memory.memory_config import MemoryConfig
from training.memory.recompute import checkpoint_activations
from training.model.decoder import Decoder
from training.model.model_config import ModelConfig
from training.parallel.fsdp import apply_fsdp
from training.parallel.pipeline_stages import split_stages
from training.parallel.tensor_parallel import apply_tensor_parallel


def parallelize(
    config: ModelConfig,
    layout: ParallelConfig,
    world: World,
    dtype: torch.dtype = torch.float32,
    memory: MemoryConfig = MemoryConfig(),
    compiled: bool = False,
) -> list[Decoder]:
    """This process's parts of the model, on the meta device: one, or its stages of the pipeline."""
    parts = split_stages(config, layout, world.axis("pp").rank)  # first: the rest sees one stage
    for part in parts:
        part.to(dtype)
        apply_tensor_parallel(part, world.axis("tp"), layout.sequence_parallel)  # shards, before any wrapper
        checkpoint_activations(part, memory.recompute)
        if compiled:
            compile_blocks(part)  # after recomputation, before FSDP
        if layout.zero == 3:
            # last: it gathers what all the others made; ZeRO-0 to 2 need no wrapper
            apply_fsdp(part, world, memory.parameters)
    return parts


def compile_blocks(part: Decoder) -> None:
    """Compile block by block: they are alike, and so one compilation serves all."""
    for block in part.blocks.values():
        block.compile()
