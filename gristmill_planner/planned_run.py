"""A planned run: a model, its batch and a layout on a cluster, of which the planner computes step time and memory.

And the request from which a search makes such runs.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import Literal, NamedTuple

from gristmill.errors import require
from gristmill_planner.hardware import Cluster
from training.config import Precision
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import OffloadTarget, Recompute
from training.model.model_config import ModelConfig
from training.parallel.pipeline.schedules import Schedule
from training.parallel.pipeline.stage_layers import stage_layers


@dataclass(frozen=True)
class Software:
    """The program that trains, as far as it decides time."""

    flash: bool
    """Attention's weights never leave the chip."""
    gradient_bytes: int
    """Bytes of an element in which gradients are summed over replicas."""
    hidden: float
    """Share of the communication between replicas that passes hide at the most, which run at the same time."""
    divided_messages: bool
    """Each tensor-parallel rank sends its part of what passes between stages (Narayanan et al. 2021, section 4.1)."""

    deepspeed: bool = False
    """The pipeline is DeepSpeed's."""
    reduction_share: float = 0.0
    """Of a node's network cards, in sums of gradients and gathers of weights; 0: as fitted."""
    schedules: tuple[Schedule, ...] = ("1f1b", "interleaved-1f1b", "zero-bubble", "zbv")
    """Those worth a search: GPipe and breadth-first take as long as 1F1B and interleaved 1F1B, and more memory;
    DualPipeV as long as ZB-V."""
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    zero: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)


OPT_HIDDEN = 0.6  # what OPT-175B's published speed leaves room for
GRISTMILL = Software(flash=True, gradient_bytes=4, hidden=OPT_HIDDEN, divided_messages=False)
MEGATRON = Software(
    flash=False, gradient_bytes=2, hidden=0.0, divided_messages=True,
    schedules=("1f1b", "interleaved-1f1b"), recompute=("none", "full"), zero=(0,),
)  # fmt: skip
MEGATRON_DEEPSPEED = Software(
    flash=False, gradient_bytes=4, hidden=0.0, divided_messages=True, deepspeed=True,
    schedules=("1f1b",), recompute=("none", "full"), zero=(0, 1),
)  # fmt: skip
FAIRSCALE = Software(
    flash=False, gradient_bytes=2, hidden=OPT_HIDDEN, divided_messages=False,
    schedules=(), recompute=("none", "full"), zero=(3,),
)  # fmt: skip
DEEPSPEED_ZERO_3 = Software(  # its share of the network is what the 175B model of Narayanan et al. 2021, table 2, had
    flash=False, gradient_bytes=2, hidden=OPT_HIDDEN, divided_messages=False, reduction_share=0.083,
    schedules=(), recompute=("none", "full"), zero=(3,),
)  # fmt: skip
MINDSPORE = Software(
    flash=False, gradient_bytes=2, hidden=0.0, divided_messages=False,
    schedules=(), recompute=("none", "full"), zero=(2,),
)  # fmt: skip


@dataclass(frozen=True)
class OptimizerStates:
    """The optimizer states that this trainer keeps, as far as they decide memory."""

    name: str = "adamw"
    ema: bool = False
    """An average of the weights."""
    moments: OffloadTarget = "device"
    """Where AdamW's moments are."""


ADAMW = OptimizerStates()


class RankAxis(NamedTuple):
    """Ranks that communicate with each other, and how far apart neighbours are."""

    ranks: int
    stride: int


@dataclass(frozen=True)
class PlannedRun:
    """A resolved model and layout, `batch` sequences of `seq_len` tokens a step, on a cluster."""

    model: ModelConfig
    layout: ParallelConfig
    batch: int
    seq_len: int
    cluster: Cluster
    recompute: Recompute = "none"
    software: Software = GRISTMILL
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage; empty: as even as they get, the last stages fewer."""
    states: OptimizerStates = ADAMW
    precision: Precision = "bf16"
    compiled: bool = False
    """Blocks are compiled."""

    @cached_property
    def axes(self) -> dict[str, RankAxis]:
        """Return the axes of the mesh and of a grid by name, as training/parallel/mesh.py numbers the ranks."""
        (depth, side, _), (pp, replicate, shard, tp) = self.layout.grid, self.layout.mesh_shape
        groups, within, ep = self.layout.expert_mesh_shape
        return {
            "column": RankAxis(side, 1), "row": RankAxis(side, side), "depth": RankAxis(depth, side * side),
            "tp": RankAxis(tp, 1), "cp": RankAxis(self.layout.cp, tp), "shard": RankAxis(shard, tp),
            "replicate": RankAxis(replicate, tp * shard), "pp": RankAxis(pp, tp * shard * replicate),
            "ep": RankAxis(ep, tp), "expert_shard": RankAxis(within, tp * ep),
            "expert_replicate": RankAxis(groups, tp * ep * within),
        }  # fmt: skip

    @property
    def parts(self) -> int:
        """t: parts into which tensor parallelism divides heads, the MLP's features and the vocabulary."""
        return self.layout.grid[1] if self.layout.on_grid else self.layout.tp

    @cached_property
    def micro_batch(self) -> int:
        """Return the sequences of a micro-batch."""
        return self.batch // (self.layout.dp * self.layout.micro_batches)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Return the layers of each stage."""
        stages = self.layout.stages
        return self.stage_layers or tuple((self.model.layers + stages - 1 - n) // stages for n in range(stages))

    @cached_property
    def held(self) -> list[list[int]]:
        """Return the stages of each pipeline rank."""
        return _stages_of_ranks(self.layout.schedule, self.layout.pp, self.layout.virtual_stages)

    @cached_property
    def rank_layers(self) -> list[int]:
        """Return the layers of each pipeline rank."""
        return _layers_of_ranks(self.layers, self.layout.schedule, self.layout.pp, self.layout.virtual_stages)


@lru_cache(4096)
def _stages_of_ranks(schedule: Schedule, pp: int, virtual_stages: int) -> list[list[int]]:
    layout = ParallelConfig(pp=pp, schedule=schedule, virtual_stages=virtual_stages)
    return [layout.stages_of_rank(rank) for rank in range(pp)]


@lru_cache(4096)
def _layers_of_ranks(layers: tuple[int, ...], schedule: Schedule, pp: int, virtual_stages: int) -> list[int]:
    return [sum(layers[stage] for stage in stages) for stages in _stages_of_ranks(schedule, pp, virtual_stages)]


@lru_cache
def layers_of_stages(model: ModelConfig, stages: int, seq_len: int) -> tuple[int, ...]:
    """Return how many layers each stage has as the trainer divides them; other programs are taken to do it alike."""
    return tuple(len(layers) for layers in stage_layers(model, stages, seq_len))


@dataclass(frozen=True)
class PlanRequest:
    """The run to plan: a resolved model, `batch` sequences of `seq_len` tokens a step, and a cluster."""

    model: ModelConfig
    batch: int
    seq_len: int
    cluster: Cluster
    precision: Precision = "bf16"
    software: Software = GRISTMILL
    states: OptimizerStates = ADAMW
    compiled: bool = False
    """Blocks are compiled, so that no schedule may compute gradients of inputs and weights apart."""
    headroom: float = 0.0
    """Share of a device's memory that is left free."""

    def __post_init__(self) -> None:
        require(
            self.software == GRISTMILL or not (self.model.experts or self.model.kv_lora_rank or self.model.sinks),
            "experts, latent attention and sinks are predicted of this trainer alone; try --software gristmill",
        )

    def run(self, layout: ParallelConfig, recompute: Recompute, stage_layers: tuple[int, ...]) -> PlannedRun:
        """Return a run of it in a layout."""
        return PlannedRun(
            self.model, layout, self.batch, self.seq_len, self.cluster, recompute, self.software, stage_layers,
            self.states, self.precision, self.compiled,
        )  # fmt: skip

    @property
    def available(self) -> float:
        """Return the bytes of a device that a layout may take."""
        return self.cluster.device.memory * (1 - self.headroom)


@lru_cache(4096)
def layer_kinds(model: ModelConfig, stages: tuple[int, ...]) -> tuple[Counter[tuple[bool, bool]], ...]:
    """Count the layers of each stage by whether they are sparse and have a window."""
    layers = iter(range(model.layers))
    kinds = list[Counter[tuple[bool, bool]]]()
    for count in stages:
        of_stage = Counter[tuple[bool, bool]]()
        for layer in islice(layers, count):
            of_stage[model.is_sparse(layer), model.layer_window(layer) > 0] += 1
        kinds.append(of_stage)
    return tuple(kinds)
