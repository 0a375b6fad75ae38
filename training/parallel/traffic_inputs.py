"""Traffic inputs: what decides the traffic of one rank, and the pieces of parameters that follow from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from training.memory.memory_config import Recompute
from training.model.model_config import ModelConfig
from training.parallel.grid.traffic import GridSizes
from training.parallel.layout import ParallelConfig
from training.parallel.parameter_shapes import ParameterShape
from training.parallel.rank_parameters import rank_parameters


class Volume(NamedTuple):
    """Number of calls, and their bytes in total.

    The bytes of a collective are those of its largest tensor: the input of an all-reduce or reduce-scatter, the output
    of an all-gather. In a ring of p ranks each rank sends (p - 1) / p of that, and twice as much for an all-reduce
    (Patarasuk & Yuan 2009); of p broadcasts or reductions, of which each rank is the root of one, (p - 1) / p too.
    """

    calls: int
    bytes: int

    def __add__(self, other: object) -> "Volume":
        assert isinstance(other, Volume)
        return Volume(self.calls + other.calls, self.bytes + other.bytes)


Traffic = dict[tuple[str, str], Volume]
"""Volume by mesh axis ("tied": between the first and last pipeline stage) and operation; without zero entries."""


@dataclass(frozen=True)
class Coordinates:
    """This rank's index along three axes of the mesh."""

    pp: int
    shard: int
    tp: int


@dataclass(frozen=True)
class TrafficInputs:
    """Inputs of the formulas, for one rank.

    `sequences`: per step and replica. `passes`: for each of its pipeline stages the passes in order: F forward, B
    backward; if backward is split, I for inputs and W for weights. Bytes per element: `itemsize` of activations and
    copies of weights, `wide` of gradient sums and the loss, `reduced` of what replicas sum.
    """

    config: ModelConfig
    layout: ParallelConfig
    rank: Coordinates
    sequences: int
    seq_len: int
    itemsize: int
    wide: int
    reduced: int
    recompute: Recompute
    stage_layers: Sequence[range]
    passes: Mapping[int, str]
    bucket_bytes: int = 25 << 20
    """Of gradient sums in a bucket."""
    chunk_bytes: int = 32 << 20
    """Of the logits that the loss has at a time."""
    parameters: dict[int, list[ParameterShape]] = field(init=False, repr=False)
    """By stage: sharded by tensor parallelism, not yet by ZeRO."""

    def __post_init__(self) -> None:
        found = {
            n: rank_parameters(self.config, self.layout, self.stage_layers[n], n, self.rank.tp) for n in self.stages
        }
        object.__setattr__(self, "parameters", found)

    @property
    def grid(self) -> GridSizes:
        """This rank's place on a grid of tensor-parallel ranks."""
        side = self.layout.grid[1]
        sequences = self.sequences // (self.layout.micro_batches * self.layout.batch_shards)
        row, column = self.rank.tp // side % side, self.rank.tp % side
        tokens = sequences * self.seq_len
        return GridSizes(self.config, side, row, column, tokens, self.itemsize, self.wide, sequences)

    @property
    def tokens(self) -> int:
        """Tokens of the replica's sequences that this rank computes with."""
        return self.sequences * self.seq_len // self.layout.cp

    @property
    def bucket_elements(self) -> int:
        """Gradient sums in a bucket."""
        return self.bucket_bytes // self.wide

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states between two blocks, for all of these."""
        return self.tokens * self.config.width * self.itemsize

    @property
    def stages(self) -> list[int]:
        """This rank's pipeline stages."""
        return self.layout.stages_of_rank(self.rank.pp)

    def holds_stage(self, stage: int) -> bool:
        """True if this rank holds the stage; -1 is the last stage."""
        return stage % self.layout.stages in self.stages
