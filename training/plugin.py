"""Plugin: the points at which an optional feature joins the training loop."""
# ruff: noqa: ARG002

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from training.checkpoint.record import CheckpointRecord
from training.checkpoint.shard_plans import State
from training.distributed.stop_signals import StopSignals
from training.model.batch import TokenBatch

LogRecord = tuple[str, int, dict[str, Any]]  # kind, step, values


class Plugin:
    """An optional feature of training: overrides the points that it needs; here they do nothing.

    Every rank calls every method. `note`: a line for the log at the start, after `after_load`; `wants_stop`: the run is
    to save a checkpoint and end.
    """

    note = ""
    wants_stop = False

    def state(self, state: State, stored: CheckpointRecord | None = None) -> State:
        """Return what a checkpoint holds in place of `state`: to save it or, by the record `stored`, to fill it."""
        return state

    def record(self) -> dict[str, Any]:
        """Return the entries of this feature in a checkpoint's record, next to the layout."""
        return {}

    def read(self, checkpoint: Path, group: dist.ProcessGroup) -> None:
        """Read more of the checkpoint that the run continues, after `state`; collective over `group`."""

    def after_load(self, step: int, stored: CheckpointRecord | None, stop: StopSignals) -> int:
        """Parameters are loaded, from a checkpoint of record `stored` if from one; returns the steps done, `step`.

        A signal in `stop`, now or later, is to end a wait.
        """
        return step

    def step(self, step: int) -> AbstractContextManager[None]:
        """Context of step `step` (from 1)."""
        return nullcontext()

    def before_backward(self, batch: TokenBatch, scale: float) -> None:
        """`ParallelModel.forward_backward` is about to be called with these arguments."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Context of a part of a step: data, backward (forward, too)."""
        return nullcontext()

    def update(self, loss_scale: float) -> AbstractContextManager[None]:
        """Context of the update of the weights, from complete gradients of the loss times `loss_scale`."""
        return nullcontext()

    def after_step(self, step: int) -> int:
        """Step `step` ends, with or without an update; returns the step to continue after."""
        return step

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Context in which the model has the weights to evaluate."""
        return nullcontext()

    def before_save(self) -> None:
        """A checkpoint is about to be saved."""

    def log_records(self) -> list[LogRecord]:
        """Return the records for the log since the last call."""
        return []

    def close(self) -> None:
        """The run ends, or failed."""


class Plugins(Plugin):
    """Several plug-ins as one, called in order."""

    def __init__(self) -> None:
        self.plugins: list[Plugin] = []

    @property
    def notes(self) -> list[str]:
        """Return the notes of all of them."""
        return [plugin.note for plugin in self.plugins if plugin.note]

    @property
    def is_stopping(self) -> bool:
        """Return whether one of them wants the run to stop."""
        return any(plugin.wants_stop for plugin in self.plugins)

    def state(self, state: State, stored: CheckpointRecord | None = None) -> State:
        for plugin in self.plugins:
            state = plugin.state(state, stored)
        return state

    def record(self) -> dict[str, Any]:
        record = dict[str, Any]()
        for plugin in self.plugins:
            record |= plugin.record()
        return record

    def read(self, checkpoint: Path, group: dist.ProcessGroup) -> None:
        for plugin in self.plugins:
            plugin.read(checkpoint, group)

    def after_load(self, step: int, stored: CheckpointRecord | None, stop: StopSignals) -> int:
        for plugin in self.plugins:
            step = plugin.after_load(step, stored, stop)
        return step

    def step(self, step: int) -> AbstractContextManager[None]:
        return _together(plugin.step(step) for plugin in self.plugins)

    def before_backward(self, batch: TokenBatch, scale: float) -> None:
        for plugin in self.plugins:
            plugin.before_backward(batch, scale)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return _together(plugin.phase(name) for plugin in self.plugins)

    def update(self, loss_scale: float) -> AbstractContextManager[None]:
        return _together(plugin.update(loss_scale) for plugin in self.plugins)

    def after_step(self, step: int) -> int:
        for plugin in self.plugins:
            step = plugin.after_step(step)
        return step

    def evaluated_weights(self) -> AbstractContextManager[None]:
        return _together(plugin.evaluated_weights() for plugin in self.plugins)

    def before_save(self) -> None:
        for plugin in self.plugins:
            plugin.before_save()

    def log_records(self) -> list[LogRecord]:
        records = list[LogRecord]()
        for plugin in self.plugins:
            records += plugin.log_records()
        return records

    def close(self) -> None:
        with ExitStack() as closing:
            for plugin in reversed(self.plugins):
                closing.callback(plugin.close)


@contextmanager
def _together(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
