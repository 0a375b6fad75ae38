"""Pipeline stages: the decoder modules of each stage. Stages are numbered in the order of layers."""

from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from training.model.decoder import Decoder
from training.parallel.layout import Layout
from training.parallel.pipeline.stage_layers import stage_layers


class StageDecoder(Decoder):
    """A decoder with some of its layers; stages but the first have no embedding, and only the last one norm and output.

    The others pass on the features (B, T, D) that they get from the stage before, in place of token ids, and return
    those for the stage after.
    """

    def __init__(self, decoder: Decoder, layers: range, is_first: bool, is_last: bool) -> None:
        """Take these modules from `decoder`."""
        nn.Module.__init__(self)
        self.config = decoder.config
        self.add_module("embed", decoder.embed if is_first else PassOn())
        self.position_table = decoder.position_table
        self.blocks = nn.ModuleDict({str(i): decoder.blocks[str(i)] for i in layers})
        self.add_module("norm", decoder.norm if is_last else PassOn())
        self.add_module("head", decoder.head if is_last else PassOn())

    def tie(self) -> None:
        """Tied matrices are on two stages: their gradients are summed, and each is updated."""


class PassOn(nn.Module):
    """Stands for a module of another stage."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x


def split_stages(decoder: Decoder, layout: Layout, rank: int, seq_len: int) -> list[Decoder]:
    """Return copies of pipeline rank `rank`'s stages of a decoder on the meta device; without a pipeline, of all of it.

    `seq_len` as of `stage_layers`.
    """
    if layout.stages == 1:
        return [deepcopy(decoder)]
    layers = stage_layers(decoder.config, layout.stages, seq_len)
    last = layout.stages - 1
    return [StageDecoder(deepcopy(decoder), layers[n], n == 0, n == last) for n in layout.stages_of_rank(rank)]


def global_name(part: Decoder, name: str) -> str:
    """Return name of a stage's parameter in the unsplit model, where a tied output matrix has the embedding's name."""
    return "embed.tokens.weight" if name == "head.weight" and part.config.tied else name
