"""TrainConfig: all options of a training run, one section per subpackage."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal

from gristmill.config import INT64, Range, check_ranges
from gristmill.errors import require
from gristmill.paths import scheme_of
from gristmill.storage.files import reject_read_only, reject_remote, reject_unknown_scheme
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.data.data_config import DataConfig
from training.distributed.torch_version import require_torch
from training.experimental.local_steps.replicas_config import ReplicasConfig
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import MemoryConfig
from training.model.model_config import ModelConfig
from training.optim.optim_config import OptimConfig
from training.optim.optimizer_kinds import KINDS
from training.optim.stability import StabilityConfig
from training.own_code import check_own, is_own
from training.profiling.profile_config import ProfileConfig
from training.profiling.record_config import RecordConfig
from training.reporting.reporting_config import EvalConfig, MetricsConfig

Precision = Literal["fp32", "bf16", "fp16", "fp64"]


@dataclass(frozen=True)
class TrainConfig:
    """Pre-train a decoder. The same command resumes from the last checkpoint in out_dir."""

    RANGES: ClassVar[dict[str, Range]] = {"seed": Range(0, INT64), "timeout": Range(0, 10_000_000)}

    out_dir: Path
    """Folder for checkpoints and metrics, also in a bucket; if it holds a checkpoint of this run, training resumes from
    it."""
    data: DataConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    replicas: ReplicasConfig = field(default_factory=ReplicasConfig)
    stability: StabilityConfig = field(default_factory=StabilityConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    record: RecordConfig = field(default_factory=RecordConfig)
    seed: int = 1
    """Seed of the initial weights, the dropout masks, the order of sequences and sampled text."""
    precision: Precision = "fp32"
    """bf16, fp16: mixed precision: products, activations and copies of the weights in that dtype; the weights that are
    updated, gradient sums, statistics and the loss in float32. fp64: everything in float64, to distinguish rounding
    from errors."""
    compile: bool = False
    """Compile each block with torch.compile: faster on a GPU, after about a minute. Not with zero-bubble schedules,
    which compute the gradients of inputs and of weights separately."""
    deterministic: bool = False
    """Use only deterministic kernels, so that a resumed run on a GPU ends with the same bytes as one that was never
    stopped; attention is slower. A CPU is deterministic anyway."""
    init_from: Path | None = None
    """Checkpoint whose parameters a new run starts from, for example one written by import_hf. Model options that are
    not given are taken from the checkpoint."""
    branch_from: Path | None = None
    """Checkpoint of another run that this new run continues, with its parameters, optimizer state and step; optim.steps
    includes the steps before it. For example, the decay of a wsd schedule can branch off from a checkpoint before it.
    Model options that are not given are taken from the checkpoint."""
    allow_lr_jump: bool = False
    """With branch_from: let the branch begin with another learning rate than the checkpoint's run would go on with, or
    warm up again (optim.warmup_from). The optimizer's state stays as it is."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU per rank if there are any, else the CPU."""
    timeout: float = 0.0
    """Seconds that a rank waits for another before the run ends with an error; 0: 60, or 600 with compile, because
    pipeline stages compile one after another, in the first step and the first evaluation."""

    @property
    def seconds_to_wait(self) -> float:
        """`timeout`, with its default filled in."""
        return self.timeout or (600.0 if self.compile else 60.0)

    @property
    def own_names(self) -> dict[str, str]:
        """Return the options whose value names code of the user's, FILE.py:NAME, with it."""
        values = {"optim.name": self.optim.name, "optim.schedule": self.optim.schedule}
        return self.model.own_names | {option: value for option, value in values.items() if is_own(value)}

    @property
    def began_from(self) -> dict[str, str]:
        """Return the checkpoint that a new run starts from, by the option that names it; empty without one."""
        given = {"init_from": self.init_from, "branch_from": self.branch_from}
        return {option: str(path if scheme_of(path) else path.absolute()) for option, path in given.items() if path}

    def check(self) -> None:
        """Raise UsageError for a value out of range, or options that exclude each other."""
        check_ranges(self)
        reject_unknown_scheme(self.out_dir)
        reject_read_only([self.out_dir])
        reject_remote(*filter(None, [self.memory.folder, self.checkpoint.folder]))
        require(
            self.timeout == 0 or self.timeout >= 1,  # ranks cannot even connect in less
            f"timeout is {self.timeout}; expected 1 or more seconds, or 0 for the default; try --timeout 0",
        )
        for section in fields(self):
            if hasattr(options := getattr(self, section.name), "RANGES"):
                check_ranges(options, f"{section.name}.")
        for option, value in self.own_names.items():
            check_own(value, option)
        self.optim.check()
        self.data.check()
        self.profile.check(self.optim.steps)
        self.record.check(self.optim.steps)
        if self.record.steps:
            self._check_recorded()
        self.eval.check()
        require(
            self.init_from is None or self.branch_from is None,
            "init_from and branch_from are both given: a run starts from one checkpoint; try one of them",
        )
        for option, is_given in (("allow_lr_jump", self.allow_lr_jump), ("data.skip", self.data.skip > 0)):
            require(
                not is_given or self.branch_from is not None,
                f"{option} is given without branch_from: only a branch can have it; try --branch_from CHECKPOINT, and "
                "another --out_dir",
            )
        self.stability.check()
        on_device = self.memory.optimizer == self.memory.parameters == "device"
        require(
            on_device or (self.optim.name in KINDS and KINDS[self.optim.name].can_offload),
            f"optim.name {self.optim.name} with memory.optimizer {self.memory.optimizer} and memory.parameters "
            f"{self.memory.parameters}: it updates on the device alone; "
            "try --memory.optimizer device --memory.parameters device, or --optim.name adamw",
        )
        require(
            not self.eval.ema or self.optim.ema_decay > 0,
            "eval.ema is true and optim.ema_decay 0: there is no average of the weights; try --optim.ema_decay 0.999",
        )
        require(
            not self.optim.ema_decay or self.memory.parameters == "device",
            f"optim.ema_decay with memory.parameters {self.memory.parameters}: the average is on the device, like "
            "the weights; try --memory.parameters device, or --optim.ema_decay 0",
        )
        self.memory.check(self.parallel.zero)
        self.parallel.check_run(self.precision, self.memory.recompute, self.compile)
        if self.compile and self.precision == "fp64":
            reason = "before, compiled attention on a CPU takes float64 for float32"
            require_torch("2.13", "compile with precision fp64", reason, "--compile false, or --precision fp32")

    def _check_recorded(self) -> None:
        """Raise UsageError for options with which steps cannot be recorded."""
        reject_remote(self.out_dir, option="record.steps with out_dir")
        alternative = "try without --record.steps"
        require(not self.compile, f"record.steps with compile: compiled blocks call no hooks; {alternative}")
        own = {
            "parallel.local_steps": bool(self.parallel.local_steps),
            "parallel.compression": self.parallel.compression != "none",
            "replicas.folder": self.replicas.folder is not None,
        }
        for option, is_given in own.items():
            require(
                not is_given,
                f"record.steps with {option}: replicas have weights or sums of their own, which no other layout has; "
                f"{alternative}",
            )
