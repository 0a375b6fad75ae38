"""Metrics: a line per report in the terminal, and every step's values in all sinks (sinks.py)."""

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gristmill.errors import UsageError, wrap_write_errors
from gristmill.wording import count_of
from training.reporting.holdouts import HoldoutLosses
from training.reporting.metrics_file import METRICS, finite, last_with, read_metrics
from training.reporting.reporting_config import MetricsConfig
from training.reporting.run_clock import RunClock
from training.reporting.seen_tokens import SeenTokens
from training.reporting.sinks import JsonLines, MetricSink, MLflow, TensorBoard, WeightsAndBiases
from training.reporting.throughput import Throughput


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
    """Prints a run's metrics on rank 0 (`active`) and sends them to its sinks; does nothing on the other ranks."""

    def __init__(self, out_dir: Path, active: bool, config: MetricsConfig, clock: RunClock | None = None) -> None:
        """Raises UsageError for a sink whose library is not installed."""
        self.out_dir = out_dir
        self.clock = clock or RunClock(1)
        self.active = active
        self.config = config
        self.sinks: list[MetricSink] = []
        for name in ("wandb", "mlflow"):
            if getattr(config, name) and importlib.util.find_spec(name) is None:
                raise UsageError(
                    f"metrics.{name} needs {name}, which is not installed: pip install 'gristmill[{name}]'"
                )

    def start(self, step: int, options: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Open the sinks to continue after `step`; what they have of later steps is from before a restart.

        `options` of the run, by name and section, are what a tracker shows as its configuration.

        Raises OutputError where they cannot be written.
        """
        if not self.active:
            return
        earlier = read_metrics(self.out_dir / METRICS) if step else ()
        self.clock.begin_steps(step, last_with(earlier, "elapsed_seconds"))
        group = self.out_dir.resolve().name
        with wrap_write_errors(self.out_dir / METRICS):
            self.sinks.append(JsonLines(self.out_dir / METRICS, step))
            if self.config.tensorboard:
                self.sinks.append(TensorBoard(self.out_dir / "tensorboard", step))
            if self.config.wandb:
                self.sinks.append(WeightsAndBiases(self.out_dir / "wandb", step, group, options))
            if self.config.mlflow:
                self.sinks.append(MLflow(self.out_dir / "mlruns", step, group, options))

    def close(self) -> None:
        """Close the sinks. Raises OutputError where what was written last does not fit on the disk."""
        with wrap_write_errors(self.out_dir), ExitStack() as closing:
            for sink in self.sinks:
                closing.callback(sink.close)

    def say(self, line: str) -> None:
        """Print a line on rank 0."""
        if self.active:
            print(line, flush=True)

    def record(self, kind: str, step: int, **values: Any) -> None:
        """Send a record to all sinks. Raises OutputError where one cannot be written."""
        for sink in self.sinks:
            with wrap_write_errors(sink.path):
                sink.record(kind, step, values)

    def log_steps(
        self,
        steps: Sequence[StepMetrics],
        total_steps: int,
        speed: Throughput,
        others: Sequence[tuple[str, int, dict[str, Any]]] = (),
    ) -> None:
        """Record every step, and after it those of the `others` (kind, step, values) that are of it.

        Weights & Biases ignores what is of an earlier step than the last. Prints the skipped steps and the last one,
        which has the times of the run, too. `speed`: the steps' average throughput.
        """
        times = self.clock.read(steps[-1].step, total_steps)
        for step in steps:
            values: dict[str, Any] = {"lr": step.lr, "loss": finite(step.loss), "grad_norm": finite(step.grad_norm)}
            if step.z_loss is not None:
                values["z_loss"] = finite(step.z_loss)
            values |= asdict(speed)
            if step is steps[-1]:
                values |= asdict(times)
            self.record("step", step.step, **values, **({"skipped": True} if step.skipped else {}))
            for kind, number, more in others:
                if number == step.step:
                    self.record(kind, number, **more)
            if step.skipped:
                self.say(f"skipped step {step.step}: {step.skipped}")
        self.say(f"{format_step(steps[-1], total_steps, speed)}  {times.describe()}")

    def log_eval(
        self,
        step: int,
        losses: Mapping[str, HoldoutLosses],
        unigram_loss: float,
        text: str,
        tasks: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Record and print an evaluation: each holdout's losses by its name, that of data.holdout by "".

        `unigram_loss` in nats/token; `text` is sampled from the model, or empty. `tasks` are recorded, and printed by
        whoever has scored them.
        """
        named = {name: set_losses.values() for name, set_losses in losses.items() if name}
        more = {"holdouts": named, "tasks": dict(tasks)}
        more = {kind: values for kind, values in more.items() if values}
        self.record("eval", step, **losses[""].values(), **more, text=text)
        for name, set_losses in losses.items():
            unigram = "" if name else f" (unigram {unigram_loss:.4f})"
            of = f"holdout {name}" if name else "holdout"
            bits = set_losses.whole.bits_per_byte
            in_bits = "" if bits is None else f", {bits:.4f} bits per byte"
            first = f"{of} after step {step}: loss {set_losses.whole.loss:.4f}{unigram}{in_bits}"
            self.say("\n".join([first, *set_losses.lines()]))
        if text:
            self.say(f"    sample: {text!r}")

    def log_seen(self, step: int, tokens: SeenTokens) -> None:
        """Record and print the tokens seen of each data set and source until `step`, if they are counted."""
        if not self.active or not (seen := tokens.after(step)):
            return
        self.record("data", step, **seen)
        since = f" since step {seen['after_step']}" if "after_step" in seen else ""
        for name, part in [*seen.get("sets", {}).items(), *seen.get("sources", {}).items()]:
            epochs = f", {part['epochs']:.2f} epochs" if "epochs" in part else ""
            shares = f"{part['share']:.2%} of all, {part['requested']:.2%} requested"
            self.say(f"    read{since} from {name}: {count_of(part['tokens'], 'token')}, {shares}{epochs}")


def format_step(step: StepMetrics, total_steps: int, speed: Throughput) -> str:
    """Format a step as one line for the terminal."""
    mfu = "n/a" if speed.mfu is None else f"{speed.mfu:.1%}"
    scale = "" if step.loss_scale is None else f"  scale {step.loss_scale:g}"
    return (
        f"step {step.step:{len(str(total_steps))}}/{total_steps}  loss {step.loss:.4f}  lr {step.lr:.2e}  "
        f"grad {step.grad_norm:.2f}{scale}  {speed.step_seconds * 1000:.0f} ms  "
        f"{speed.tokens_per_second:,.0f} tokens/s  MFU {mfu}  {speed.memory_bytes / 2**30:.2f} GiB"
    )
