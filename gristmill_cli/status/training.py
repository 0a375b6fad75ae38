"""Status of a training run: how far it is, since when, how fast, and when it ends; from its files alone."""

import re
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from gristmill.storage.files import list_level, read_files
from gristmill.storage.lock import is_locked, lease_seconds
from gristmill.storage.stores import store_of
from gristmill.wording import count_of
from gristmill_cli.run_config import recorded_options
from training.checkpoint.run_file import CHECKPOINTS, STARTS
from training.reporting.metrics_file import METRICS, finite, last_with, read_metrics

_STEP = re.compile(r"step-(\d+)")


class TrainingStatus(msgspec.Struct):
    """A training run; losses in nats/token, None where nothing is recorded yet."""

    state: str  # "working", "stopped" or "finished"
    steps: int  # that are recorded
    total_steps: int
    starts: int
    host: str = ""  # of rank 0, at the last start
    processes: int = 0
    began: str = ""  # the last start
    loss: float | None = None
    holdout_loss: float | None = None
    tokens_per_second: float | None = None
    elapsed_seconds: float | None = None
    device_hours: float | None = None
    recorded: float | None = None  # when the last step was recorded, in seconds since 1970
    ends: float | None = None  # when it will be finished
    checkpoint: int | None = None  # the last one's step

    @property
    def lines(self) -> list[str]:
        """Return the status in words."""
        progress = f"training: {self.state}, step {self.steps:,} of {self.total_steps:,}"
        if self.host:
            progress += f" on {self.host}, {count_of(self.processes, 'process', 'processes')}"
        if self.starts:
            progress += f", {count_of(self.starts, 'start')}"
        lines = [progress]
        if self.loss is not None:
            losses = f"loss {self.loss:.4f}"
            if self.holdout_loss is not None:
                losses += f", holdout {self.holdout_loss:.4f}"
            if self.tokens_per_second is not None:
                losses += f", {self.tokens_per_second:,.0f} tokens/s"
            lines.append(losses)
        if self.elapsed_seconds is not None and self.recorded is not None:
            elapsed = timedelta(seconds=round(self.elapsed_seconds))
            cost = f"{elapsed} until {datetime.fromtimestamp(self.recorded):%Y-%m-%d %H:%M:%S}"
            if self.device_hours is not None:
                cost += f", {self.device_hours:,.2f} device hours"
            lines.append(cost)
        if self.state == "working" and self.ends is not None:
            lines.append(f"ends about {datetime.fromtimestamp(self.ends):%Y-%m-%d %H:%M}")
        if self.state == "stopped":
            kept = "no checkpoint"
            if self.checkpoint is not None:
                kept = f"the checkpoint of step {self.checkpoint:,}"
            lines.append(f"nobody trains here; the same command resumes from {kept}")
        return lines


def is_training(options: dict[str, Any]) -> bool:
    """Return whether a run.json has the options of a training run."""
    return "steps" in options and "dedup" not in options


def training_status(out: Path) -> TrainingStatus | None:
    """Return the status of the training run in `out`; None where there is none."""
    options = recorded_options(out)
    if not is_training(options):
        return None
    records = list(read_metrics(out / METRICS))
    steps = [record for record in records if record["kind"] == "step"]
    evaluations = [record for record in records if record["kind"] == "eval"]
    total = int(options["steps"])
    starts = options.get(STARTS, [])
    status = TrainingStatus(_state(out, steps, total), 0, total, len(starts))
    if starts:
        start = starts[-1]
        status.host = start["host"]
        status.processes = start["processes"]
        status.began = start["date"]
    if steps:
        status.steps = steps[-1]["step"]
        status.loss = finite(steps[-1].get("loss"))
        status.tokens_per_second = finite(steps[-1].get("tokens_per_second"))
    if evaluations:
        status.holdout_loss = finite(evaluations[-1].get("loss"))
    timed = last_with(steps, "elapsed_seconds")
    if timed is not None:
        status.elapsed_seconds = finite(timed["elapsed_seconds"])
        status.device_hours = finite(timed.get("device_hours"))
        status.recorded = finite(timed.get("time"))
        remaining = finite(timed.get("remaining_seconds"))
        if status.recorded is not None and remaining is not None:
            status.ends = max(time.time(), status.recorded + remaining)
    status.checkpoint = _last_checkpoint(out)
    return status


def _last_checkpoint(out: Path) -> int | None:
    """Return the step of the last checkpoint; None if there is none."""
    last: int | None = None
    folders, _ = list_level(out / CHECKPOINTS)
    for name in folders:
        match = _STEP.fullmatch(name)
        if match:
            last = max(last or 0, int(match[1]))
    return last


def _state(out: Path, steps: Sequence[dict[str, Any]], total: int) -> str:
    if _is_written(out / ".lock"):
        return "working"
    if steps and steps[-1]["step"] >= total:
        return "finished"
    return "stopped"


def _is_written(lock: Path) -> bool:
    """Return whether a run holds its lock; in a bucket, whether it renews its lease within half the lease's time."""
    if store_of(lock).has_file_locks:
        return lock.is_file() and is_locked(lock)
    before = _content(lock)
    until = time.monotonic() + lease_seconds() / 2
    while before and time.monotonic() < until:
        time.sleep(min(0.5, lease_seconds() / 8))
        now = _content(lock)
        if now != before:
            return bool(now)
    return False


def _content(lock: Path) -> bytes:
    return next(read_files([lock]), b"")
