"""Pipeline parallelism's options, and the check that a model and its micro-batches fit them."""

from dataclasses import dataclass
from typing import ClassVar

from gristmill.config import Range
from gristmill.errors import require
from training.distributed.torch_version import require_torch
from training.model.model_config import ModelConfig
from training.parallel.pipeline.schedules import SCHEDULES, Pass, PipelineSchedule, RankStages, Schedule
from training.parallel.size_error import require_size


@dataclass(frozen=True)
class PipelineOptions:
    """Ranks over which the layers are split into stages, and the micro-batches that pass through these."""

    pp: int = 1
    """Pipeline-parallel ranks: the layers are split into stages over them."""
    schedule: Schedule = "1f1b"
    """Pipeline schedule: the order of the micro-batches' forward and backward passes."""
    virtual_stages: int = 0
    """Pipeline stages per rank; 0: the schedule's default, 1 or 2."""
    micro_batches: int = 0
    """Micro-batches per step and replica, over which gradients are accumulated; 0: one per pipeline stage. More
    micro-batches need less activation memory and shrink the pipeline bubble."""
    RANGES: ClassVar[dict[str, Range]] = {
        "pp": Range(1, 2**31 - 1),
        **dict.fromkeys(("virtual_stages", "micro_batches"), Range(0, 2**31 - 1)),
    }

    @property
    def pipeline(self) -> PipelineSchedule | None:
        """Return the schedule that the stages run; None without a pipeline."""
        return SCHEDULES[self.schedule] if self.pp > 1 else None

    @property
    def stages(self) -> int:
        """Return the pipeline stages over all ranks."""
        return self.pp * self.virtual_stages

    @property
    def stage_ranks(self) -> list[int]:
        """Return the pipeline rank of each stage."""
        ranks = list(range(self.pp))
        if self.pipeline is not None and self.pipeline.is_v_shaped:
            return [*ranks, *reversed(ranks)]
        return ranks * self.virtual_stages

    def stages_of_rank(self, rank: int) -> list[int]:
        """Return the stages that pipeline rank `rank` has, in ascending order."""
        return [stage for stage, holder in enumerate(self.stage_ranks) if holder == rank]

    def passes(self, rank: int) -> list[Pass]:
        """Passes of pipeline rank `rank` of a resolved layout, in order; without a pipeline F and B in turn."""
        if self.pipeline is None:
            return [Pass("F", 0), Pass("B", 0)] * self.micro_batches
        return self.pipeline.passes(RankStages(self.pp, rank, self.stages_of_rank(rank), self.micro_batches))

    def describe_pipeline(self) -> list[str]:
        """Return the words for logs, such as "pp 2 (1f1b)"."""
        turns = f", {self.virtual_stages} stages each" if self.virtual_stages > 1 else ""
        return [f"pp {self.pp} ({self.schedule}{turns})"] * (self.pp > 1)

    def check_pipeline(self, model: ModelConfig) -> None:
        """Raise UsageError unless the layers fill the stages, and the micro-batches suit the schedule."""
        require(
            self.pp > 1 or self.virtual_stages == 1,
            f"parallel.virtual_stages {self.virtual_stages} needs a pipeline, and parallel.pp is 1; "
            "try --parallel.pp 2, or --parallel.virtual_stages 1",
        )
        if self.pipeline is not None:
            self._check_stages(self.pipeline, model)
            self._check_micro_batches(self.pipeline)
            if self.pipeline.splits_backward:
                require_torch(
                    "2.13",
                    f"parallel.schedule {self.schedule}",
                    "before, torch's separate pass for the gradients of weights fails, or counts some twice",
                    "--parallel.schedule interleaved-1f1b",
                )
        require(self.micro_batches > 0, f"parallel.micro_batches is {self.micro_batches}; expected 1 or more")

    def _check_stages(self, pipeline: PipelineSchedule, model: ModelConfig) -> None:
        per_rank = pipeline.stages_per_rank
        require(
            self.virtual_stages == per_rank if per_rank else self.virtual_stages > 1,
            f"parallel.virtual_stages is {self.virtual_stages}; schedule {self.schedule} is defined for "
            f"{per_rank or '2 or more'} stages per rank; try --parallel.virtual_stages {per_rank or 2}",
        )
        max_stages = model.layers // self.virtual_stages
        require_size(
            model.layers >= self.stages,
            f"model.layers {model.layers} cannot fill {self.stages} pipeline stages ({self.pp} ranks x "
            f"{self.virtual_stages})",
            "pp",
            range(max_stages, 0, -1),
            f"--model.layers {self.stages}",
        )

    def _check_micro_batches(self, pipeline: PipelineSchedule) -> None:
        count = self.micro_batches
        min_count = pipeline.least_micro_batches(self.pp, self.stages)
        require(
            count >= min_count,
            f"parallel.micro_batches {count} are too few: schedule {self.schedule} of {self.stages} stages takes "
            f"{min_count} or more; try --parallel.micro_batches {min_count}",
        )
        rounds = max(1, count // self.pp)
        require(
            self.virtual_stages == 1 or count % rounds == 0,
            f"parallel.micro_batches {count} do not divide into rounds of {self.pp}, as schedule {self.schedule} takes "
            f"them; try --parallel.micro_batches {-(-count // self.pp) * self.pp}",
        )

    def check_compiled_stages(self, compiled: bool) -> None:
        """Raise UsageError for compiled blocks under a schedule that splits their backward pass."""
        require(
            not compiled or self.pipeline is None or not self.pipeline.splits_backward,
            f"compile and parallel.schedule {self.schedule}: a compiled block computes the gradients of its "
            "inputs and weights together, and this schedule needs them separately; "
            "try --parallel.schedule interleaved-1f1b, or --compile false",
        )
