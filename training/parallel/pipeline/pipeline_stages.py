"""Pipeline stages: the layers and the decoder modules of each stage. Stages are numbered in the order of layers."""

from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from training.model.decoder import Decoder
from training.model.model_config import ModelConfig
from training.parallel.layout import Layout


def stage_layers(config: ModelConfig, stages: int, seq_len: int) -> list[range]:
    """Split the layers into consecutive ranges, one per stage, that minimize the cost of the most expensive stage.

    The output matrix counts as layers of the last stage; the embedding is a lookup and costs nothing. `seq_len`: tokens
    of a training sequence, which may be fewer than the model's context. Every stage has at least one layer.
    """
    counts, costs = [1] * stages, [1.0] * stages
    costs[-1] += _head_cost(config, seq_len)
    for _ in range(config.layers - stages):
        cheapest = costs.index(min(costs))
        counts[cheapest], costs[cheapest] = counts[cheapest] + 1, costs[cheapest] + 1
    ends = [sum(counts[: i + 1]) for i in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _head_cost(config: ModelConfig, seq_len: int) -> float:
    """Cost of the output matrix in layers: its multiplications over a layer's, with attention to half a sequence."""
    attention = 2 * config.width * (config.q_width + config.kv_width)
    mlp = (3 if config.is_gated else 2) * config.width * config.ffn_width
    return config.vocab_size * config.width / (attention + mlp + config.q_width * seq_len)


class StageDecoder(Decoder):
    """A decoder with some of its layers; stages but the first have no embedding, and only the last one norm and output.

    The others pass on the features (B, T, D) that they get from the stage before, in place of token ids, and return
    those for the stage after.
    """

    def __init__(self, decoder: Decoder, layers: range, is_first: bool, is_last: bool) -> None:
        """Take these modules from `decoder`."""
        nn.Module.__init__(self)
        self.config = decoder.config
        self.add_module("embed", decoder.embed if is_first else _PassOn())
        self.position_table = decoder.position_table
        self.blocks = nn.ModuleDict({str(i): decoder.blocks[str(i)] for i in layers})
        self.add_module("norm", decoder.norm if is_last else _PassOn())
        self.add_module("head", decoder.head if is_last else _PassOn())

    def tie(self) -> None:
        """Tied matrices are on two stages: their gradients are summed, and each is updated."""


class _PassOn(nn.Module):
    """Stands for a module of another stage."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x


def split_stages(decoder: Decoder, layout: Layout, rank: int, seq_len: int) -> list[Decoder]:
    """Copies of pipeline rank `rank`'s stages of a decoder on the meta device; without a pipeline, of all of it.

    `seq_len` as of `stage_layers`.
    """
    if layout.stages == 1:
        return [deepcopy(decoder)]
    layers, last = stage_layers(decoder.config, layout.stages, seq_len), layout.stages - 1
    return [StageDecoder(deepcopy(decoder), layers[n], n == 0, n == last) for n in layout.stages_of_rank(rank)]


def global_name(part: Decoder, name: str) -> str:
    """Name of a stage's parameter in the unsplit model, where a tied output matrix has the embedding's name."""
    return "embed.tokens.weight" if name == "head.weight" and part.config.tied else name
