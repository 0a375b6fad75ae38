"""Memory inputs: what decides the memory of one rank, and the units and buckets that follow from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from gristmill_planner.memory.block_memory import BlockSizes
from training.config import Precision
from training.memory.memory_config import OffloadTarget, Recompute
from training.model.model_config import ModelConfig
from training.parallel.layout import ParallelConfig
from training.parallel.parameter_shapes import ParameterShape, pack_buckets
from training.parallel.rank_parameters import rank_parameters


class PassBytes(NamedTuple):
    """Bytes when a pass begins, the most of them within it, and when a whole backward pass reaches its blocks."""

    before: int
    peak: int
    at_blocks: tuple[int, ...] = ()
    """Last block first."""


@dataclass(frozen=True)
class MemoryInputs:
    """What the formulas need; `model` and `layout` are resolved. What dropout keeps is not counted."""

    model: ModelConfig
    layout: ParallelConfig
    sequences: int
    """Sequences per step and replica."""
    seq_len: int
    stage_layers: Sequence[range]
    """Layers of each pipeline stage; one range without a pipeline."""
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    rank: int = 0
    """Pipeline rank."""
    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    ema: bool = False
    """True with an average of the weights."""
    moments: OffloadTarget = "device"
    """Where AdamW's moments are."""
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    """CPU threads: one has fused elementwise loops."""
    bucket_bytes: int = 25 << 20
    """Of gradient sums in a bucket."""
    tp_rank: int = 0
    """Index along "tp"; the first has the most of a vocabulary that does not divide."""
    shard_rank: int = 0
    """Index along "shard", of weights and of what the optimizer keeps; all else is of the first, which has most."""
    parameters: dict[int, list[ParameterShape]] = field(init=False, repr=False)
    """By stage of this rank."""

    def __post_init__(self) -> None:
        found = {
            stage: rank_parameters(self.model, self.layout, self.stage_layers[stage], stage, self.tp_rank)
            for stage in self.layout.stages_of_rank(self.rank)
        }
        object.__setattr__(self, "parameters", found)

    @cached_property
    def itemsize(self) -> int:
        """e: bytes of an element in the compute dtype."""
        return self.block.itemsize

    @cached_property
    def wide(self) -> int:
        """Bytes of an element of masters, moments and gradient sums."""
        return self.block.wide

    @property
    def shards(self) -> int:
        """n: ranks over which ZeRO shards."""
        return self.layout.shards

    @property
    def parts(self) -> int:
        """Parts into which tensor parallelism divides heads, the MLP's features and the vocabulary."""
        return self.layout.tp if self.layout.tensor == "1d" else self.layout.grid[1]

    @cached_property
    def block(self) -> BlockSizes:
        """Sizes of a block for one micro-batch."""
        layout, on_cpu = self.layout, self.device == "cpu" and self.precision == "fp32"
        return BlockSizes(
            self.model,
            self.sequences // (layout.micro_batches * layout.batch_shards),
            self.seq_len,
            self.precision,
            self.parts,
            layout.sequence_parallel,
            fused_loops=on_cpu and self.threads == 1,
            fused_products=on_cpu,
            cp=layout.cp,
            context=layout.context,
            tensor=layout.tensor,
        )

    def units(self, stage: int) -> list[list[ParameterShape]]:
        """What ZeRO-3 gathers at once, in the order of the forward pass: the embedding, each block, and the head.

        A matrix that both ends share makes one unit of them.
        """
        found: dict[str, list[ParameterShape]] = {}
        for p in self.parameters[stage]:
            found.setdefault("head" if self.is_tied(stage) and p.unit == "embed" else p.unit, []).append(p)
        return list(found.values())

    def buckets(self, stage: int) -> list[list[ParameterShape]]:
        """The parameters of each bucket of gradient sums."""
        return pack_buckets(self.parameters[stage], self.bucket_bytes // self.wide)

    def is_tied(self, stage: int) -> bool:
        """True if the stage has both ends of the model, and one matrix for them."""
        return bool(self.model.tied) and self.layout.stages == 1 and stage == 0
