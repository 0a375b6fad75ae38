"""EvalConfig and MetricsConfig: the options of evaluation and of metrics."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from gristmill.config import INT64, Range
from gristmill.errors import require


@dataclass(frozen=True)
class EvalConfig:
    """Options of evaluation: the interval, the number of sequences, and the text to sample."""

    RANGES: ClassVar[dict[str, Range]] = {
        **dict.fromkeys(("every", "sequences", "task_items"), Range(0, INT64)),
        "sample_tokens": Range(0, 1_000_000),
        "temperature": Range(0),
    }

    every: int = 100
    """Steps between evaluations; 0: only after the last step."""
    sequences: int = 0
    """Number of sequences of each holdout to evaluate, from the first one; 0: all."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weight of each source in the holdouts' losses; sources that are not named do not count. By default every token
    counts the same."""
    lengths: tuple[int, ...] = ()
    """Boundaries between ranges of document length, in tokens; the loss of each range is reported."""
    tasks: tuple[str, ...] = ()
    """Benchmarks of lm_eval to score at each evaluation, by name or as .yaml files: multiple choice, or the likelihood
    of an answer. Needs gristmill[eval]."""
    task_folder: Path | None = None
    """Folder of .yaml files of tasks, which eval.tasks may name."""
    task_items: int = 0
    """Items of each task, from the first one; 0: all."""
    sample_tokens: int = 64
    """Tokens of text to sample at each evaluation; 0: none."""
    prompt: str = ""
    """Prompt of the sampled text; empty: the start of a document."""
    ema: bool = False
    """Evaluate and sample the average of the weights (optim.ema_decay) instead of the weights."""
    temperature: float = 0.8
    """Sampling temperature; 0: always the most probable token."""

    def check(self) -> None:
        """Raise UsageError for a prompt that is no text, weights that add up to nothing, lengths out of order."""
        require(
            not any("\ud800" <= character <= "\udfff" for character in self.prompt),  # Python's form of other bytes
            f"eval.prompt is {self.prompt!r}, which is not UTF-8; expected text; try another --eval.prompt",
        )
        require(
            all(weight > 0 and math.isfinite(weight) for weight in self.weights.values()),
            f"eval.weights are {self.weights}; expected finite numbers above 0; leave out sources that should not "
            "count",
        )
        require(
            list(self.lengths) == sorted(set(self.lengths)) and min(self.lengths, default=1) > 0,
            f"eval.lengths are {self.lengths}; expected ascending numbers of tokens from 1 on; try "
            "--eval.lengths 256 1024 4096",
        )


@dataclass(frozen=True)
class MetricsConfig:
    """Options of metrics: the terminal's interval, the sinks, the device's peak."""

    RANGES: ClassVar[dict[str, Range]] = {"log_every": Range(1, INT64), "peak_tflops": Range(0)}

    log_every: int = 10
    """Steps between lines in the terminal. metrics.jsonl and TensorBoard receive every step."""
    tensorboard: bool = True
    """Write TensorBoard event files to out_dir/tensorboard."""
    wandb: bool = False
    """Write a run of Weights & Biases to out_dir/wandb, offline unless WANDB_MODE says otherwise."""
    mlflow: bool = False
    """Write a run of MLflow to out_dir/mlruns, or where MLFLOW_TRACKING_URI says."""
    sources: bool = False
    """At each evaluation, count the tokens read from each source since the first step, including those before a resume.
    """
    peak_tflops: float = 0.0
    """One device's peak in TFLOP/s, for the model FLOPs utilization; 0: from a table of GPUs."""
