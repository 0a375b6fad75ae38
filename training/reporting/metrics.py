"""Metrics: a line per report in the terminal, and every step's values in metrics.jsonl and TensorBoard."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from gristmill.config import INT64, Range
from gristmill.errors import wrap_write_errors
from gristmill.storage.local import atomic_write_bytes
from training.reporting.holdout_losses import HoldoutLosses
from training.reporting.metrics_file import METRICS, finite, read_metrics
from training.reporting.throughput import Throughput


@dataclass(frozen=True)
class MetricsConfig:
    """Options of metrics: the terminal's interval, TensorBoard, the device's peak."""

    RANGES: ClassVar[dict[str, Range]] = {"log_every": Range(1, INT64), "peak_tflops": Range(0)}

    log_every: int = 10
    """Steps between lines in the terminal. metrics.jsonl and TensorBoard receive every step."""
    tensorboard: bool = True
    """Write TensorBoard event files to out_dir/tensorboard."""
    sources: bool = False
    """At each evaluation, count the tokens seen of each source so far; a resumed run counts from its first step."""
    peak_tflops: float = 0.0
    """One device's peak in TFLOP/s, for the model FLOPs utilization; 0: from a table of GPUs."""


@dataclass(frozen=True)
class StepMetrics:
    """Values logged per step.

    `loss`: mean over the global batch, nats/token. `grad_norm`: 2-norm over all parameters, before clipping.
    `loss_scale`: fp16's, after this step; None for other precisions. `skipped`: why the update was skipped; empty if
    it was not. `z_loss`: mean over the global batch, not part of `loss`; None if there is none.
    """

    step: int
    lr: float
    loss: float
    grad_norm: float
    loss_scale: float | None
    skipped: str
    z_loss: float | None = None


class Reporter:
    """Prints and records a run's metrics on rank 0 (`active`); does nothing on the other ranks."""

    def __init__(self, out_dir: Path, active: bool, tensorboard: bool) -> None:
        self.path = out_dir / METRICS
        self.active, self.tensorboard = active, tensorboard

    def start(self, step: int) -> None:
        """Open the files to continue after `step`; drop records of later steps, from before a restart.

        Raises OutputError where they cannot be written.
        """
        if not self.active:
            return
        with wrap_write_errors(self.path):
            kept = [json.dumps(record) + "\n" for record in read_metrics(self.path) if 0 < record["step"] <= step]
            atomic_write_bytes(self.path, "".join(kept).encode())
            self._file = self.path.open("a", encoding="utf-8")
            if self.tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # takes a second to import, not needed on every rank

                self._board = SummaryWriter(str(self.path.parent / "tensorboard"), purge_step=step + 1)

    def close(self) -> None:
        """Close the files. Raises OutputError where what was written last does not fit on the disk."""
        with wrap_write_errors(self.path.parent), ExitStack() as files:
            for file in (getattr(self, "_file", None), getattr(self, "_board", None)):
                if file is not None:
                    files.callback(file.close)

    def say(self, line: str) -> None:
        """Print a line on rank 0."""
        if self.active:
            print(line, flush=True)

    def record(self, kind: str, step: int, **values: Any) -> None:
        """Append a record to metrics.jsonl; numbers and text go to TensorBoard too, as `kind/name`."""
        if not self.active:
            return
        with wrap_write_errors(self.path):
            self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            self._file.flush()
        if self.tensorboard:
            with wrap_write_errors(self.path.parent / "tensorboard"):
                self._add_to_board(kind, step, values)

    def _add_to_board(self, kind: str, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                self._add_to_board(f"{kind}/{name}", step, value)
            elif isinstance(value, int | float):
                self._board.add_scalar(f"{kind}/{name}", value, step)
            elif isinstance(value, str):
                self._board.add_text(f"{kind}/{name}", value, step)

    def log_steps(self, steps: Sequence[StepMetrics], total_steps: int, speed: Throughput) -> None:
        """Record every step; print the skipped ones and the last one. `speed`: the steps' average throughput."""
        for step in steps:
            values = {"lr": step.lr, "loss": finite(step.loss), "grad_norm": finite(step.grad_norm)}
            if step.z_loss is not None:
                values["z_loss"] = finite(step.z_loss)
            self.record("step", step.step, **values, **asdict(speed), **({"skipped": True} if step.skipped else {}))
            if step.skipped:
                self.say(f"skipped step {step.step}: {step.skipped}")
        self.say(format_step(steps[-1], total_steps, speed))

    def log_eval(self, step: int, losses: Mapping[str, HoldoutLosses], unigram_loss: float, text: str) -> None:
        """Record and print an evaluation: each holdout's losses by its name, that of data.holdout by "".

        `unigram_loss` in nats/token; `text` is sampled from the model, or empty.
        """
        named = {name: found.values() for name, found in losses.items() if name}
        self.record("eval", step, **losses[""].values(), **({"holdouts": named} if named else {}), text=text)
        for name, found in losses.items():
            bits = f"{found.whole.bits_per_byte:.4f} bits per byte"
            unigram = "" if name else f" (unigram {unigram_loss:.4f})"
            of = f"holdout {name}" if name else "holdout"
            self.say(
                "\n".join([f"{of} after step {step}: loss {found.whole.loss:.4f}{unigram}, {bits}", *found.lines()])
            )
        if text:
            self.say(f"    {text!r}")

    def log_seen(self, step: int, seen: dict[str, Any]) -> None:
        """Record and print the tokens seen of each data set and source (see `SeenTokens.after`)."""
        self.record("data", step, **seen)
        for name, part in [*seen.get("sets", {}).items(), *seen.get("sources", {}).items()]:
            epochs = f", {part['epochs']:.2f} epochs" if "epochs" in part else ""
            shares = f"{part['share']:.2%} of all, {part['requested']:.2%} requested"
            self.say(f"    seen of {name}: {part['tokens']:,} tokens, {shares}{epochs}")


def format_step(step: StepMetrics, total_steps: int, speed: Throughput) -> str:
    """Format a step as one line for the terminal."""
    mfu = "n/a" if speed.mfu is None else f"{speed.mfu:.1%}"
    scale = "" if step.loss_scale is None else f"  scale {step.loss_scale:g}"
    return (
        f"step {step.step:{len(str(total_steps))}}/{total_steps}  loss {step.loss:.4f}  lr {step.lr:.2e}  "
        f"grad {step.grad_norm:.2f}{scale}  {speed.step_seconds * 1000:.0f} ms  "
        f"{speed.tokens_per_second:,.0f} tokens/s  MFU {mfu}  {speed.memory_bytes / 2**30:.2f} GiB"
    )
