"""Pipeline stages: the layers and the decoder modules of each stage. Stages are numbered in the order of layers."""

from copy import deepcopy

from training.distributed.layout import ParallelConfig
from training.model.decoder import Decoder
from training.model.model_config import ModelConfig


def stage_layers(config: ModelConfig, stages: int) -> list[range]:
    """Split the layers into consecutive ranges, one per stage, that minimize the cost of the most expensive stage.

    The output matrix counts as layers of the last stage; the embedding is a lookup and costs nothing. Every stage has
    at least one layer.
    """
    counts, costs = [1] * stages, [1.0] * stages
    costs[-1] += _head_cost(config)
    for _ in range(config.layers - stages):
        cheapest = costs.index(min(costs))
        counts[cheapest], costs[cheapest] = counts[cheapest] + 1, costs[cheapest] + 1
    ends = [sum(counts[: i + 1]) for i in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _head_cost(config: ModelConfig) -> float:
    """Cost of the output matrix in layers: its multiplications over a layer's, with attention to half a context."""
    kv = 2 * config.width * config.width * config.kv_heads // config.heads
    matrices = 2 * config.width**2 + kv + (3 if config.mlp == "swiglu" else 2) * config.width * config.ffn_width
    return config.vocab_size * config.width / (matrices + config.width * config.context)


def split_stages(decoder: Decoder, layout: ParallelConfig, rank: int) -> list[Decoder]:
    """The stages of pipeline rank `rank`: copies of a decoder on the meta device without the other stages' modules."""
    layers, parts = stage_layers(decoder.config, layout.stages), []
    for stage in layout.stages_of_rank(rank):
        part = deepcopy(decoder)
        if stage > 0:
            part.embed = None
        if stage < layout.stages - 1:
            part.norm = part.head = None
        for name in list(part.blocks):
            if int(name) not in layers[stage]:
                del part.blocks[name]
        parts.append(part)
    return parts


def global_name(part: Decoder, name: str) -> str:
    """Name of a stage's parameter in the unsplit model, where a tied output matrix has the embedding's name."""
    return "embed.tokens.weight" if name == "head.weight" and part.config.tied else name
