"""ParallelConfig: the section [parallel] of a run: the core's layout with the options of the experimental kinds."""

from dataclasses import dataclass, field
from typing import ClassVar

from gristmill.config import Range
from gristmill.errors import require
from gristmill.wording import count_of
from training.experimental.compression.options import CompressionOptions
from training.experimental.grids.options import GridOptions
from training.model.model_config import ModelConfig
from training.parallel.experiment import Experiment, experiment_of


@dataclass(frozen=True)
class ParallelConfig(CompressionOptions, GridOptions):
    """The parallel layout: dp x tp x pp x cp ranks."""

    local_steps: int = field(default=0, repr=False)
    """DiLoCo (Douillard et al. 2023): each replica takes this many optimizer steps on its own sequences, then their
    weights are averaged, by an outer optimizer (optim.outer_lr, optim.outer_momentum). A replica is a data-parallel
    one, or with ZeRO a zero_group of them. 0: gradients are summed over all replicas in every step."""
    RANGES: ClassVar[dict[str, Range]] = {
        **GridOptions.RANGES,
        **CompressionOptions.RANGES,
        "local_steps": Range(0, 2**31 - 1),
    }

    @property
    def local_replicas(self) -> int:
        return self.replicas // self.shards if self.local_steps else 1

    def describe(self) -> str:
        local = (
            f" x {count_of(self.local_replicas, 'replica')} of {count_of(self.local_steps, 'local step')}"
            if self.local_steps
            else ""
        )
        return super().describe() + local

    def unused(self) -> set[str]:
        return super().unused() | (set() if self.local_steps else {"local_steps"})

    def check(self, processes: int, model: ModelConfig, seq_len: int) -> None:
        super().check(processes, model, seq_len)
        require(
            self.compression == "none" or not self.on_grid,
            f"parallel.compression {self.compression} and parallel.tensor {self.tensor}: the blocks of a grid are not "
            "compressed yet; try --parallel.tensor 1d",
        )
        require(
            self.compression == "none" or not model.experts,
            f"parallel.compression {self.compression} and model.experts {model.experts}: gradients of experts are not "
            "compressed yet; try --parallel.compression none",
        )
        require(
            not self.local_steps or self.ep == 1,
            f"parallel.local_steps {self.local_steps} and parallel.ep {self.ep}: replicas with weights of their own "
            "have all experts; try --parallel.ep 1",
        )
        require(
            not self.local_steps or model.balance != "bias",
            f"parallel.local_steps {self.local_steps} and model.balance bias: each replica would have its own biases; "
            "try --model.balance sequence",
        )


@experiment_of.register(ParallelConfig)
def _(layout: ParallelConfig) -> Experiment:
    if layout.on_grid:
        from training.experimental.grids.experiment import GridExperiment

        return GridExperiment(layout)
    if layout.compression != "none":
        from training.experimental.compression.bucket import CompressionExperiment

        return CompressionExperiment(layout)
    return Experiment()
