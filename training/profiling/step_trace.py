"""StepTrace: a trace of some steps by torch's profiler, and a snapshot of a GPU's memory."""

import shutil
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from gristmill.storage.local import atomic_write
from training.profiling.profile_config import ProfileConfig

FOLDER = "profile"
_MOST_EVENTS = 1_000_000  # of memory, in a snapshot


class StepTrace:
    """Traces the steps of `config.span` on one rank; elsewhere, and without a span, it does nothing.

    The trace is for chrome://tracing or ui.perfetto.dev, the snapshot for pytorch.org/memory_viz.
    """

    def __init__(self, config: ProfileConfig, rank: int, device: torch.device, out_dir: Path) -> None:
        self.span = config.span if rank in config.ranks else None
        self.rank, self.device, self.folder = rank, device, out_dir / FOLDER
        self._profiler: profile | None = None
        self._first = 0

    def before(self, step: int) -> None:
        """Begin if `step` is the first of the span, or the first of this process that is in it."""
        if self.span is None or self._profiler is not None or not self.span[0] <= step <= self.span[1]:
            return
        cuda = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        if cuda:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
        self._profiler, self._first = profile(activities=activities, record_shapes=True), step
        self._profiler.start()

    def after(self, step: int) -> None:
        """Write the trace, whole or not at all, if `step` is the last of the span. Raises OutputError if it cannot."""
        if self._profiler is None or (self.span is not None and step < self.span[1]):
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        name = f"steps-{self._first}-{step}.rank-{self.rank}"
        with atomic_write(self.folder / f"{name}.json.gz") as file, tempfile.TemporaryDirectory() as scratch:
            exported = f"{scratch}/trace.json.gz"  # torch compresses what has this ending
            profiler.export_chrome_trace(exported)
            shutil.copyfile(exported, file)
        if self.device.type == "cuda":
            with atomic_write(self.folder / f"{name}.memory.pickle") as file:
                torch.cuda.memory._dump_snapshot(str(file))
            torch.cuda.memory._record_memory_history(enabled=None)

    def close(self) -> None:
        """Stop a trace whose last step did not come, without writing it."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
