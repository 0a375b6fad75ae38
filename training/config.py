"""What a training run is configured by: dataclasses, one a section."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.errors import require
from training.layout import SPLIT_BACKWARD, ParallelConfig
from training.memory import MemoryConfig
from training.model_config import ModelConfig
from training.precision import Precision
from training.stability import StabilityConfig


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how much of it in a step."""

    train: Path
    """Folder of token shards to train on."""
    holdout: Path
    """Folder of token shards to evaluate on."""
    seq_len: int = 256
    """Tokens in a sequence."""
    batch_size: int = 32
    """Sequences in a step, over all processes."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning rate: linear warm-up, then half a cosine."""

    name: Literal["adamw", "sgd"] = "adamw"
    """sgd: plain, without momentum or decay; its updates show every error in a gradient's scale."""
    steps: int = 1000
    lr: float = 1e-3
    """The highest learning rate, at the end of the warm-up."""
    min_lr: float = 1e-4
    """The learning rate of the last step."""
    warmup_steps: int = 50
    weight_decay: float = 0.1
    """Applied to matrices only."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    """Longest gradient, by its 2-norm over all parameters; 0: any length."""


@dataclass(frozen=True)
class EvalConfig:
    """How often the holdout is measured, and what text is drawn then."""

    every: int = 100
    """Steps between evaluations; 0: only after the last step."""
    sequences: int = 0
    """Holdout sequences to measure, from the first; 0: all."""
    sample_tokens: int = 64
    """Tokens of text to draw; 0: none."""
    prompt: str = ""
    """What the text begins with; empty: the start of a document."""
    temperature: float = 0.8
    """0: always the most probable token."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is written down."""

    every: int = 200
    """Steps between checkpoints; 0: only after the last step."""
    keep: int = 2
    """How many of the latest to keep."""
    beside: bool = True
    """Write them while the training goes on, from a copy in memory; not where [memory] keeps states on disk."""


@dataclass(frozen=True)
class MetricsConfig:
    """What is told of the run, and where."""

    log_every: int = 10
    """Steps between lines in the terminal. metrics.jsonl and TensorBoard receive every step."""
    tensorboard: bool = True
    peak_tflops: float = 0.0
    """One device's peak in 10^12 operations a second, for the model FLOPs utilisation; 0: from a table of GPUs."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    out_dir: Path
    """Where checkpoints and metrics go. If it holds this run's checkpoint, training goes on from there."""
    data: DataConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    stability: StabilityConfig = field(default_factory=StabilityConfig)
    seed: int = 1
    precision: Precision = "fp32"
    """bf16, fp16: the matrix products in that; parameters, sums of gradients and the loss stay in float32.
    fp64: everything in float64, to see what is rounding and what is not."""
    compile: bool = False
    """Compile each block with torch.compile: faster on a GPU, after a minute's wait. Not with schedules that compute
    the two kinds of gradients apart."""
    init_from: Path | None = None
    """A checkpoint whose parameters a new run begins with, such as import_hf writes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout: float = 60.0
    """Seconds one process waits for another before it gives up."""

    def check(self) -> None:
        """Raise UsageError for a value that no run could have."""
        optim, data = self.optim, self.data
        above_zero = {
            "optim.steps": optim.steps,
            "optim.lr": optim.lr,
            "data.seq_len": data.seq_len,
            "data.batch_size": data.batch_size,
            "checkpoint.keep": self.checkpoint.keep,
            "metrics.log_every": self.metrics.log_every,
            "timeout": self.timeout,
        }
        not_below_zero = {
            "optim.min_lr": optim.min_lr,
            "optim.warmup_steps": optim.warmup_steps,
            "optim.weight_decay": optim.weight_decay,
            "optim.clip": optim.clip,
            "eval.every": self.eval.every,
            "eval.sequences": self.eval.sequences,
            "eval.sample_tokens": self.eval.sample_tokens,
            "eval.temperature": self.eval.temperature,
            "checkpoint.every": self.checkpoint.every,
        }
        for key, value in above_zero.items():
            require(value > 0, f"{key} is {value}; wanted more than 0")
        for key, value in not_below_zero.items():
            require(value >= 0, f"{key} is {value}; wanted 0 or more")
        require(
            not self.compile or self.parallel.pp == 1 or self.parallel.schedule not in SPLIT_BACKWARD,
            f"compile and parallel.schedule {self.parallel.schedule}: a compiled block computes the gradients of its "
            "input and of its weights at once, and this schedule fills its bubbles with the latter; "
            "try --parallel.schedule interleaved-1f1b, or --compile false",
        )
        self.stability.check()
