"""Layout: the options of all kinds of parallelism together, filled in for a number of ranks and checked."""

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

from gristmill.config import Range
from gristmill.errors import UsageError, require
from gristmill.wording import count_of
from training.model.model_config import ModelConfig
from training.parallel.context.options import ContextOptions
from training.parallel.data.options import DataOptions
from training.parallel.expert.options import ExpertOptions
from training.parallel.pipeline.options import PipelineOptions
from training.parallel.size_error import SizeError
from training.parallel.tensor.options import TensorOptions


@dataclass(frozen=True)
class Layout(ExpertOptions, ContextOptions, PipelineOptions, TensorOptions, DataOptions):
    """dp x tp x pp x cp ranks. Each kind's options, and what they are checked for, are in the kind's folder.

    The fields are in the opposite order of the classes, as dataclasses have them.
    """

    RANGES: ClassVar[dict[str, Range]] = {
        **DataOptions.RANGES,
        **TensorOptions.RANGES,
        **PipelineOptions.RANGES,
        **ContextOptions.RANGES,
        **ExpertOptions.RANGES,
    }

    def resolve(self, processes: int, model: ModelConfig, seq_len: int, is_trained: bool = False) -> Self:
        """Return a copy with every 0 filled in for `processes` ranks. Raises UsageError if it does not fit.

        The sizes that its message suggests fit. Of a model that `is_trained` it suggests no other sizes.
        """
        full = self._filled(processes)
        try:
            full.check(processes, model, seq_len)
        except SizeError as error:
            keeps_model = is_trained and error.other.startswith("--model.")
            other = "" if keeps_model else error.other
            advice = self._advice(error, other, processes, model, seq_len)
            raise UsageError(f"{error.fault}; {advice}") from error
        return full

    def _filled(self, processes: int) -> Self:
        """Return a copy with every 0 filled in."""
        full = replace(
            self,
            dp=self.dp or max(1, processes // max(1, self.ranks_of_replica)),
            virtual_stages=self.virtual_stages or (self.pipeline.stages_per_rank or 2 if self.pipeline else 1),
        )
        full = replace(full, zero_group=full.zero_group or (full.dp if full.zero else 1))
        return replace(full, micro_batches=full.micro_batches or (full.stages if full.pp > 1 else 1))

    def _advice(self, error: SizeError, other: str, processes: int, model: ModelConfig, seq_len: int) -> str:
        """Options that pass the checks which `error` failed: for the processes that were started, or with others.

        `other`: an option beside its sizes; empty: none.
        """
        layouts: dict[int, Layout] = {}
        for size in error.sizes:
            changed: dict[str, Any] = {error.option: size}
            layouts[size] = replace(self, **changed)
        fitting = [size for size, layout in layouts.items() if layout._fits(processes, model, seq_len)]
        sizes = ", ".join(map(str, sorted(fitting)))
        advice = [f"--parallel.{error.option} {size}" for size in fitting[:1]]
        if not fitting:
            for size, layout in layouts.items():
                needed = max(1, layout.dp) * layout.ranks_of_replica
                if layout._fits(needed, model, seq_len):
                    count = count_of(needed, "process", "processes")
                    advice = [f"--parallel.{error.option} {size} with {count}"]
                    break
        several = f"; with {count_of(processes, 'process', 'processes')} {sizes} are possible" * (len(fitting) > 1)
        advice += filter(None, [other])
        return (
            f"try {', or '.join(advice)}{several}" if advice else f"expected one of {', '.join(map(str, error.sizes))}"
        )

    def _fits(self, processes: int, model: ModelConfig, seq_len: int) -> bool:
        """Return whether this layout, resolved, passes all checks."""
        try:
            self._filled(processes).check(processes, model, seq_len)
        except UsageError:
            return False
        return True

    def describe(self) -> str:
        """Return one line for logs, such as "dp 4 x ZeRO-2 x tp 2"; ep divides ranks that are counted there."""
        kinds = [self.describe_data(), self.describe_tensor(), self.describe_pipeline(), self.describe_context()]
        experts = f", ep {self.ep} within dp" + " x cp" * (self.cp > 1) if self.ep > 1 else ""
        return " x ".join(word for words in kinds for word in words) + experts

    def record(self) -> dict[str, Any]:
        """Return the fields, as checkpoints have them.

        Those of kinds beyond data, tensor and pipeline only where used.
        """
        return {key: value for key, value in asdict(self).items() if key not in self.unused()}

    def unused(self) -> set[str]:
        """Return the fields that checkpoints do not have: of kinds that came later, and are not used."""
        return {*(("cp", "context") if self.cp == 1 else ()), *(("ep",) if self.ep == 1 else ())}

    @property
    def ranks_of_replica(self) -> int:
        """Return the ranks of one data-parallel replica."""
        return self.tp * self.pp * self.cp

    @property
    def processes(self) -> int:
        """Return the number of ranks."""
        return self.dp * self.ranks_of_replica

    @property
    def replicas(self) -> int:
        """Ranks over which the gradient of a parameter is summed: they have other sequences, or tokens of them."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Return the ranks over which ZeRO shards a parameter."""
        return self.zero_group * self.cp if self.zero else 1

    @property
    def mesh_shape(self) -> tuple[int, int, int, int]:
        """Return the ranks along each axis of the mesh: "pp", "replicate", "shard", "tp"."""
        return self.pp, self.replicas // self.shards, self.shards, self.tp

    @property
    def expert_mesh_shape(self) -> tuple[int, int, int]:
        """Ranks along "expert_replicate", "expert_shard" and "ep": for experts in place of "replicate" x "shard"."""
        shards = max(1, self.shards // self.ep)
        return self.replicas // (self.ep * shards), shards, self.ep

    @property
    def local_replicas(self) -> int:
        """Return the replicas of weights of their own along "replicate", over which gradients are not summed.

        1 without them.
        """
        return 1

    def check(self, processes: int, model: ModelConfig, seq_len: int) -> None:
        """Raise UsageError unless this resolved layout fits `processes` ranks, the model and the sequence length."""
        require(
            min(self.dp, self.tp, self.pp) > 0,
            f"parallel.dp, tp and pp are {self.dp}, {self.tp} and {self.pp}; expected 1 or more of each",
        )
        self.check_data()
        self.check_tensor(model, seq_len)
        self.check_context(model, seq_len)
        self.check_pipeline(model)
        self.check_expert(model, self.replicas, self.shards)
        require(
            not self.shards_parameters or self.pipeline is None or not self.pipeline.splits_backward,
            f"parallel.zero 3 frees parameters that schedule {self.schedule} still needs for the weight gradients "
            "(torch drops gradients, or computes wrong ones); try --parallel.zero 2, or --parallel.schedule 1f1b",
        )
        dp = self.dp
        tp = self.tp
        pp = self.pp
        cp = self.cp
        fits = processes % self.ranks_of_replica == 0  # asked last: a possible layout is what to start processes for
        advice = f"--parallel.dp {processes // self.ranks_of_replica}" if fits else f"{self.processes} processes"
        factors = f"dp {dp} x tp {tp} x pp {pp}" + (f" x cp {cp}" if cp > 1 else "")
        require(
            self.processes == processes,
            f"{factors} = {self.processes} processes, and {processes} were started; try {advice}",
        )

    def check_run(self, precision: str, recompute: str, compiled: bool) -> None:
        """Raise UsageError for options of the run that do not go together with this layout, resolved or not."""
        self.check_precision(precision)
        self.check_compiled_stages(compiled)
        self.check_context_blocks(recompute, compiled)
