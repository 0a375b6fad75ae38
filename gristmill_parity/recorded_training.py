"""Recorded training: a run of the trainer records the tensors of some steps, for `gristmill check`.

Further forward and backward passes of the same batch, without an update, have their rounding perturbed: how far their
tensors are off is what rounding explains of another layout's.
"""

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch

from gristmill_parity.recorded_case import Places, held_values
from gristmill_parity.recording.perturb import Perturb, reference_runs
from gristmill_parity.recording.recorder import Recorder, record
from training.distributed.process_group import main_only
from training.model.batch import TokenBatch
from training.parallel.pipeline.pipeline_stages import PassOn
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
        self._recorder: Recorder | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        if step not in self.config.steps:
            yield
            return
        self._folder = recording_of(self.trainer.config.out_dir, step)
        main_only(lambda: shutil.rmtree(self._folder, ignore_errors=True))  # of more ranks, before a resume
        with ExitStack() as self._step_files:
            yield
        self._step_files = None
        self._recorder = None

    def before_backward(self, batch: TokenBatch, scale: float) -> None:
        if self._step_files is None:
            return
        for run in reference_runs(self._folder, self.trainer.config.precision):
            if run.perturb is None:
                continue
            if self._copies_choose_experts:
                break
            with self._record(run.folder, run.perturb) as recorder:
                self._write_initial_weights(recorder)
                self.model.forward_backward(batch, scale)
                self._write_gradients(recorder)
            self.trainer.optimizer.zero_grad()
            self.model.discard_pass()
        base = next(run for run in reference_runs(self._folder, self.trainer.config.precision) if run.perturb is None)
        self._recorder = self._step_files.enter_context(self._record(base.folder, None))
        self._write_initial_weights(self._recorder)

    @contextmanager
    def update(self, loss_scale: float) -> Iterator[None]:  # noqa: ARG002
        if self._recorder is None:
            yield
            return
        self._write_gradients(self._recorder)
        yield
        self._recorder.after_step(held_values({p.name: p.local for p in self.model.params}))

    @property
    def _copies_choose_experts(self) -> bool:
        """True where ranks that share tokens choose experts: perturbed by each, they might choose otherwise."""
        return self.model.routing is not None and (self.model.layout.tp > 1 or self.places.is_grid)

    def _record(self, folder: Path, perturb: Perturb | None) -> AbstractContextManager[Recorder]:
        return record(
            self.model.parts, folder, axes=self.places.coordinates, placements=self.places,
            keep=self.config.keep or "auto", perturb=perturb, micro_batches=self.model.layout.micro_batches,
            loss_scale=self.trainer.stability.scale, leave_out=(PassOn,), rename=self.places.rename,
        )  # fmt: skip

    def _write_initial_weights(self, recorder: Recorder) -> None:
        for name, weight in held_values({p.name: p.local for p in self.model.params}).items():
            recorder.write(name, "initial weight", weight, step=0)

    def _write_gradients(self, recorder: Recorder) -> None:
        loss_scale = self.trainer.stability.scale
        gradients = held_values({p.name: p.local.grad for p in self.model.params})
        recorder.after_backward({name: gradient / loss_scale for name, gradient in gradients.items()})
