"""EvaluateConfig: what to evaluate of a checkpoint, and on how many processes."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from tyro.conf import Positional

from gristmill.config import INT64, Range, check_ranges
from gristmill.errors import UsageError, require
from gristmill.storage.files import reject_remote
from training.config import Precision
from training.experimental.parallel_config import ParallelConfig
from training.reporting.reporting_config import EvalConfig

_SECTION = re.compile(r"\b(eval|data)\.(?=(lengths|weights|sequences|seq_len|mask_documents)\b)")


@contextmanager
def own_option_names() -> Iterator[None]:
    """Name this command's options, which have no section, in errors that name training's."""
    try:
        yield
    except UsageError as error:
        raise UsageError(_SECTION.sub("", str(error))) from error


@dataclass(frozen=True)
class EvaluateConfig:
    """Measure the losses of a checkpoint on token shards or text files, and its scores in benchmarks."""

    RANGES: ClassVar[dict[str, Range]] = {
        **dict.fromkeys(("seq_len", "sequences", "stride", "limit"), Range(0, INT64)),
        "fewshot": Range(0, 1000),
        "micro_batch_size": Range(1, INT64),
    }

    checkpoint: Positional[Path]
    """A checkpoint (OUT/checkpoints/step-…), or a folder of checkpoints or a run's --out_dir, for the latest one."""
    tokens: Positional[tuple[Path, ...]] = ()
    """Folders of token shards, made with the checkpoint's tokenizer."""
    text: tuple[Path, ...] = ()
    """Text files in UTF-8, encoded with the checkpoint's tokenizer."""
    tasks: tuple[str, ...] = ()
    """Benchmarks of lm_eval, by name or as .yaml files; needs gristmill[eval]."""
    task_folder: Path | None = None
    """Folder of .yaml files of tasks, which --tasks may name."""
    limit: int = 0
    """Items of each task, from the first; 0: all."""
    fewshot: int | None = None
    """Items with their answers that come before each item of a task; by default as the task says."""
    items: Path | None = None
    """JSON lines file for the score of each item of the tasks, for gristmill contamination."""
    tokenizer: Path | None = None
    """The checkpoint's tokenizer, for --text and --tasks; by default that of TOKENS, or of the run's folder."""
    seq_len: int = 0
    """Tokens per sequence; the first one has no context. 0: the model's context."""
    stride: int = 0
    """For --text: tokens between the starts of two sequences. If it is below seq_len, sequences overlap, and every
    token after the first seq_len is predicted from at least seq_len - stride tokens; the time grows as seq_len /
    stride. 0: seq_len, no overlap."""
    micro_batch_size: int = 8
    """Sequences computed together on each replica; parallel.micro_batches is for training only."""
    sequences: int = 0
    """Number of sequences of each folder to evaluate, from the first one; 0: all."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weight of each source in the loss; sources that are not named do not count. By default every token counts the
    same."""
    lengths: tuple[int, ...] = ()
    """Boundaries between ranges of document length, in tokens; the loss of each range is reported."""
    ema: bool = False
    """Evaluate the average of the weights instead of the weights, for a run with optim.ema_decay."""
    code: tuple[Path, ...] = ()
    """Files of yours with the parts of the model that are yours: their code runs, as in training. They have the names
    that they had there."""
    mask_documents: bool | None = None
    """Documents do not see each other, as in training with data.mask_documents; by default as in the run that wrote the
    checkpoint."""
    out: Path | None = None
    """JSON file to write the losses to."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: Precision = "fp32"
    """As in training."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU per rank if there are any, else the CPU."""

    @own_option_names()
    def check(self) -> None:
        """Raise UsageError for a value out of range, or nothing to evaluate."""
        check_ranges(self)
        reject_remote(*filter(None, [self.out, self.items]))
        check_ranges(self.parallel, "parallel.")
        self.eval.check()
        require(
            not self.parallel.micro_batches,
            f"parallel.micro_batches is {self.parallel.micro_batches}, which divides a training step; try "
            f"--micro_batch_size {self.micro_batch_size}, the sequences that are computed together",
        )
        for name in ("local_steps", "reduce_bf16", "compression"):
            value = getattr(self.parallel, name)
            require(
                value in (0, "none"),
                f"parallel.{name} is {value}, which has an effect on training alone; leave --parallel.{name} out",
            )
        require(
            self.parallel.pp > 1 or self.parallel.schedule == ParallelConfig.schedule,
            f"parallel.schedule {self.parallel.schedule} has no effect with parallel.pp 1; leave --parallel.schedule "
            "out",
        )
        require(
            bool(self.tokens or self.text or self.tasks),
            "nothing to evaluate on: give folders of token shards, --text FILE, or --tasks NAME",
        )
        require(
            bool(self.text) or not self.stride,
            f"stride is {self.stride}, but there is no --text: only sequences of a text overlap; try --stride 0",
        )
        require(
            bool(self.text or self.tasks) or self.tokenizer is None,
            f"tokenizer is {self.tokenizer}, but there is no --text: TOKENS are encoded; leave --tokenizer out",
        )
        for name in ("task_folder", "limit", "fewshot", "items"):
            require(
                bool(self.tasks) or getattr(self, name) in (None, 0),
                f"{name} is given, but there are no --tasks; leave --{name} out",
            )
        for name in ("weights", "lengths", "sequences"):
            require(
                bool(self.tokens or not getattr(self, name)),
                f"{name} is given, but there are no TOKENS: a text is one document, of no source, and read to its end; "
                f"leave --{name} out",
            )

    @property
    def eval(self) -> EvalConfig:
        """Return the options of evaluation as a training run has them."""
        return EvalConfig(sequences=self.sequences, weights=self.weights, lengths=self.lengths)
