"""The stages of a pipeline: which layers each has, and on which process it lies."""

import torch

from training.distributed.layout import ParallelConfig
from training.model.decoder import Decoder
from training.model.model_config import ModelConfig

V_SHAPED = ("zbv", "dualpipev")  # the last stage lies with the first: process r has stages r and 2 p - 1 - r


def stage_numbers(layout: ParallelConfig, rank: int) -> list[int]:
    """The stages of the pipeline's process `rank`, in ascending order."""
    if layout.schedule in V_SHAPED and layout.pp > 1:
        return [rank, 2 * layout.pp - 1 - rank]
    return [rank + layout.pp * turn for turn in range(layout.virtual_stages)]


def stage_owner(layout: ParallelConfig, stage: int) -> int:
    """Which of the pipeline's processes has a stage."""
    return next(rank for rank in range(layout.pp) if stage in stage_numbers(layout, rank))


def stage_layers(config: ModelConfig, stages: int) -> list[range]:
    """The layers of each stage, so that the stage with most to compute has as little as possible.

    A layer costs what its matrices and its attention to half a context do; the output matrix makes the last
    stage's share of layers smaller (the embedding is only looked up). Every stage has one layer at least.
    """
    counts, costs = [1] * stages, [1.0] * stages
    costs[-1] += _head_in_layers(config)
    for _ in range(config.layers - stages):
        cheapest = costs.index(min(costs))
        counts[cheapest], costs[cheapest] = counts[cheapest] + 1, costs[cheapest] + 1
    ends = [sum(counts[: i + 1]) for i in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _head_in_layers(config: ModelConfig) -> float:
    kv = 2 * config.width * config.width * config.kv_heads // config.heads
    matrices = 2 * config.width**2 + kv + (3 if config.mlp == "swiglu" else 2) * config.width * config.ffn_width
    return config.vocab_size * config.width / (matrices + config.width * config.context)


def split_stages(config: ModelConfig, layout: ParallelConfig, rank: int) -> list[Decoder]:
    """This process's stages, on the meta device: whole decoders less what the other stages have."""
    layers, parts = stage_layers(config, layout.stages), []
    for number in stage_numbers(layout, rank):
        with torch.device("meta"):
            part = Decoder(config)
        if number > 0:
            part.embed = None
        if number < layout.stages - 1:
            part.norm = part.head = None
        for name in list(part.blocks):
            if int(name) not in layers[number]:
                del part.blocks[name]
        parts.append(part)
    return parts


def whole_name(part: Decoder, name: str) -> str:
    """A stage's parameter as the whole model calls it: a tied output matrix is the embedding, wherever it lies."""
    return "embed.tokens.weight" if name == "head.weight" and part.config.tied else name
