"""Traffic inputs: what decides the traffic of one rank."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from training.memory.memory_config import Recompute
from training.model.model_config import ModelConfig
from training.parallel.layout import Layout
from training.parallel.parameter_shapes import ParameterShape


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
class TrafficInputs:
    """Inputs of the formulas, for one rank.

    `rank`: its index along "pp", "shard" and "tp". `sequences`: per step and replica. Bytes per element: `itemsize` of
    activations and copies of weights, `wide` of gradient sums and the loss, `reduced` of what replicas sum.
    """

    config: ModelConfig
    layout: Layout
    rank: Mapping[str, int]
    sequences: int
    seq_len: int
    itemsize: int
    wide: int
    reduced: int
    recompute: Recompute
    stage_layers: Sequence[range]
    parameters: Mapping[int, Sequence[ParameterShape]]
    """By stage: sharded by tensor parallelism, not yet by ZeRO."""
    bucket_bytes: int = 25 << 20
    """Of gradient sums in a bucket."""
    chunk_bytes: int = 32 << 20
    """Of the logits that the loss has at a time."""

    @property
    def tokens(self) -> int:
        """Return the tokens of the replica's sequences that this rank computes with."""
        return self.sequences * self.seq_len // self.layout.cp

    @property
    def bucket_elements(self) -> int:
        """Return the gradient sums in a bucket."""
        return self.bucket_bytes // self.wide

    @property
    def hidden_bytes(self) -> int:
        """Return the bytes of the hidden states between two blocks, for all of these."""
        return self.tokens * self.config.width * self.itemsize

    @property
    def stages(self) -> list[int]:
        """Return this rank's pipeline stages."""
        return self.layout.stages_of_rank(self.rank["pp"])

    def holds_stage(self, stage: int) -> bool:
        """Return whether this rank has the stage; -1 is the last stage."""
        return stage % self.layout.stages in self.stages

    @property
    def layers(self) -> int:
        """Return the layers of this rank's stages."""
        return sum(len(self.stage_layers[stage]) for stage in self.stages)

    @property
    def recomputed_layers(self) -> int:
        """Return the number of times that a layer is recomputed in a step, over all layers."""
        return sum(len(self.stage_layers[stage]) * self.recomputations(stage) for stage in self.stages)

    def recomputations(self, stage: int) -> int:
        """Number of times a stage's blocks are recomputed: once per backward pass, twice if backward is split."""
        return 0 if self.recompute == "none" else self.backward_passes(stage)

    def backward_passes(self, stage: int) -> int:
        """Return the number of a stage's backward passes; those for inputs and for weights are two."""
        kinds = "BIW" if stage else "BW"  # the first stage's input has no gradient
        return sum(kind in kinds and at == stage for kind, at in self.layout.passes(self.rank["pp"]))

    def own_numel(self, p: ParameterShape) -> int:
        """Return the number of elements in the rows of a parameter that this rank updates."""
        layout = self.layout
        if not p.of_experts:
            return p.rows_numel(layout.shards, self.rank["shard"])
        _, shards, ep = layout.expert_mesh_shape
        return p.rows_numel(shards, self.rank["shard"] // ep % shards)


def add_traffic(parts: Iterable[Traffic]) -> Traffic:
    """Return the sum of several, without zero entries."""
    total: Traffic = {}
    for part in parts:
        for key, volume in part.items():
            total[key] = total.get(key, Volume(0, 0)) + volume
    return {key: volume for key, volume in total.items() if volume.calls}
