"""Profiler: what the options ask to see of a run, at the steps that they ask for."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from gristmill.errors import require
from training.parallel.parallel_model import ParallelModel
from training.plugin import LogRecord, Plugin
from training.profiling.layer_norms import LayerNorms
from training.profiling.profile_config import ProfileConfig
from training.profiling.step_times import StepTimes
from training.profiling.step_trace import StepTrace


class Profiler(Plugin):
    """Traces, times and norms of a run's steps. Every rank calls every method."""

    def __init__(self, config: ProfileConfig, model: ParallelModel, names: Sequence[str], out_dir: Path) -> None:
        """`names` of all parameters. Raises UsageError for a rank that the run does not have."""
        world = model.world
        most = max(config.ranks, default=0)
        require(
            most < world.size,
            f"profile.ranks has {most}, and the run has the ranks 0 to {world.size - 1}; try --profile.ranks 0",
        )
        self.config = config
        self._trace = StepTrace(config, world.rank, world.device, out_dir)
        self._times = StepTimes(config.times, model.parts, world)
        self._norms = LayerNorms(names, model.params, world) if config.norms else None
        self._records: list[LogRecord] = []

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Context of a training step."""
        self._step = step
        self._trace.before(step)
        with self._times.step(step, self.config.traces(step)):
            yield
        self._trace.after(step)
        if self._times.seconds:
            self._records.append(("times", step, self._times.seconds))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Context of a part of a step (see `StepTimes`)."""
        return self._times.phase(name)

    @contextmanager
    def update(self, loss_scale: float) -> Iterator[None]:
        """Context of the update of the weights, from gradients of the loss times `loss_scale`."""
        measured = self._norms is not None and self._step % self.config.norms == 0
        norms = self._norms.update(loss_scale) if measured and self._norms is not None else nullcontext()
        with norms, self.phase("optimizer"):
            yield
        if measured and self._norms is not None:
            self._records.append(("norms", self._step, self._norms.norms))

    def log_records(self) -> list[LogRecord]:
        """Records (kind, step, values) since the last call."""
        found, self._records = self._records, []
        return found

    def close(self) -> None:
        """Stop what is still traced."""
        self._trace.close()
