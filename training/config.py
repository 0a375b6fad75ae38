"""What a training run is configured by: dataclasses, one a section."""

from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec

from gristmill.errors import require
from gristmill.io.token_shards import Manifest
from training.checkpoint.checkpoint import CheckpointConfig
from training.data.batches import DataConfig
from training.distributed.layout import SPLIT_BACKWARD, ParallelConfig
from training.kernels.precision import Precision
from training.memory.memory_config import MemoryConfig
from training.model.model_config import ModelConfig
from training.optim.optim_config import OptimConfig
from training.optim.stability import StabilityConfig
from training.reporting.evaluate import EvalConfig
from training.reporting.metrics import MetricsConfig


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
        """Raise UsageError for a value out of range, or options that exclude each other."""
        for section in (self.data, self.optim, self.eval, self.checkpoint, self.metrics, self.stability):
            section.check()
        self.memory.check(self.parallel.zero)
        require(self.timeout > 0, f"timeout is {self.timeout}; wanted more than 0")
        require(
            not self.compile or self.parallel.pp == 1 or self.parallel.schedule not in SPLIT_BACKWARD,
            f"compile and parallel.schedule {self.parallel.schedule}: a compiled block computes the gradients of its "
            "input and of its weights at once, and this schedule fills its bubbles with the latter; "
            "try --parallel.schedule interleaved-1f1b, or --compile false",
        )

    def identity(self, model: ModelConfig, train: Manifest, holdout: Manifest) -> dict[str, Any]:
        """What makes a run this run, by option: neither where files lie nor how many processes share the work.

        `model` is the resolved model; `train` and `holdout` the manifests of the token shards. A run resumes
        only in a folder of the same identity.
        """
        optim = {f"optim.{key}": value for key, value in asdict(self.optim).items() if key != "steps"}
        return {
            **{f"model.{key}": value for key, value in asdict(model).items() if key != "preset"},
            "data.train": _fingerprint(train),
            "data.holdout": _fingerprint(holdout),
            "data.seq_len": self.data.seq_len,
            "data.batch_size": self.data.batch_size,
            **optim,
            "seed": self.seed,
            "precision": self.precision,
        }


def _fingerprint(manifest: Manifest) -> str:
    return sha256(msgspec.json.encode([shard.sha256 for shard in manifest.shards])).hexdigest()[:16]
