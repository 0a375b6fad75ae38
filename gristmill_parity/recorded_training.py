"""Recorded training: a run of the trainer records the tensors of some steps, for `gristmill check`.

If the first step after a start is recorded, the same batch passes through the model three more times, without an
update and with its rounding perturbed: how far those tensors are off is what rounding explains of another layout's. In
later steps the weights of two layouts differ already, so that their recordings are compared only with those of the
same layout, bit for bit.
"""

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch

from gristmill_parity.recorded_case import Places, write_gradients, write_initial_weights, write_update
from gristmill_parity.recording.perturb import ReferenceRun, reference_runs
from gristmill_parity.recording.recorder import Recorder, record
from training.distributed.process_group import main_only
from training.model.batch import TokenBatch
from training.plugin import Plugin
from training.profiling.record_config import recording_of
from training.run_plan import RunPlan
from training.trainer import Trainer


def recorded_trainer(plan: RunPlan, device: torch.device) -> Trainer:
    """Return a trainer that records the steps of `plan.config.record`."""
    trainer = Trainer(plan, device)
    trainer.plugins.plugins.append(StepRecorder(trainer))
    trainer.is_recorded = True
    return trainer


class StepRecorder(Plugin):
    """Records the steps that the options name, in a folder each; every rank calls every method."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.model = trainer.model
        self.config = trainer.config.record
        self.places = Places(trainer.model)
        self._step_files: ExitStack | None = None
        """Open while a recorded step is taken."""
        self._folder = Path()
        self._first_step = 0
        """The first step that this process takes; 0 before it."""
        self._is_first = False
        self._recorder: Recorder | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        self._first_step = self._first_step or step
        if step not in self.config.steps:
            yield
            return
        self._is_first = step == self._first_step
        self._folder = recording_of(self.trainer.config.out_dir, step)
        main_only(lambda: shutil.rmtree(self._folder, ignore_errors=True))  # of more ranks, before a resume
        with ExitStack() as self._step_files:
            yield
        self._step_files = None
        self._recorder = None

    def before_backward(self, batch: TokenBatch, scale: float) -> None:
        if self._step_files is None:
            return
        base, *perturbed = reference_runs(self._folder, self.trainer.config.precision)
        if self._is_first and not self._copies_choose_experts:
            for run in perturbed:
                self._record_perturbed(run, batch, scale)
        self._recorder = self._step_files.enter_context(self._record(base))
        write_initial_weights(self._recorder, self.model)

    @contextmanager
    def update(self, loss_scale: float) -> Iterator[None]:  # noqa: ARG002
        if self._recorder is None:
            yield
            return
        write_gradients(self._recorder, self.model, self.trainer.stability.scale)
        yield
        write_update(self._recorder, self.model, self.trainer.optimizer)

    def _record_perturbed(self, run: ReferenceRun, batch: TokenBatch, scale: float) -> None:
        """Record a forward and backward pass with noise, and forget its gradients."""
        with self._record(run) as recorder:
            self.model.forward_backward(batch, scale)
            write_gradients(recorder, self.model, self.trainer.stability.scale)
        self.trainer.optimizer.zero_grad()
        self.model.discard_pass()

    @property
    def _copies_choose_experts(self) -> bool:
        """Return True where ranks that share tokens choose experts: perturbed by each, they might choose otherwise."""
        return self.model.routing is not None and (self.model.layout.tp > 1 or self.places.is_grid)

    def _record(self, run: ReferenceRun) -> AbstractContextManager[Recorder]:
        options = self.places.options(self.config.keep or "auto", self.trainer.stability.scale)
        return record(self.model.parts, run.folder, layout=self.places.layout(), options=options, perturb=run.perturb)
