"""Runs of the trainer agree with the plain decoder, and a fault in the trainer's own code turns them red."""

import ast
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gristmill_parity.plain.token_data
import training.reporting.holdouts
import training.train_step
import training.trainer
from gristmill_parity.comparison import Certifier, limits
from gristmill_parity.runs.run_case import RunCase, trainer_runs
from gristmill_parity.runs.stint import Stint, run_stint
from training.checkpoint.record import CheckpointRecord
from training.checkpoint.shard_plans import State
from training.data.batch_schedule import BatchSchedule
from training.data.batches import Batches, PrefetchLoader
from training.data.mix import EpochOrder, MixOrder
from training.distributed.rank_pool import RankPool
from training.experimental.compression.error_feedback import ErrorFeedback
from training.experimental.parallel_config import ParallelConfig
from training.model.dropout import Dropout
from training.optim.optimizer import Optimizer
from training.parallel.parallel_model import ParallelModel
from training.reporting.holdouts import Holdouts
from training.step_sums import StepSums
from training.trainer import Trainer

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]

RUNS = trainer_runs(True)[0]
DEFAULT = trainer_runs(False)[0]


@pytest.fixture(scope="module")
def certifier(rank_pool: RankPool) -> Certifier:
    return Certifier(rank_pool)


@pytest.mark.every(6)
@pytest.mark.parametrize("chosen", RUNS, ids=str)
def test_a_run_agrees_with_the_plain_decoder(certifier: Certifier, chosen: RunCase) -> None:
    row = certifier.certify(chosen)
    assert row.passed, row.reason


def test_the_default_certificate_has_runs_of_each_kind() -> None:
    assert {case.stop for case in DEFAULT} == {"crash", "signal"}
    assert any(case.layout == case.resumed for case in DEFAULT) and any(case.weights for case in DEFAULT)
    assert any(case.documents for case in DEFAULT) and any(case.batch_ramp for case in DEFAULT)
    assert {case.optimizer for case in DEFAULT} == {"sgd", "adamw"} and any(case.dropout for case in DEFAULT)


def test_the_order_of_the_reference_imports_nothing_of_ours() -> None:
    tree = ast.parse(Path(str(gristmill_parity.plain.token_data.__file__)).read_text())
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    assert {str(module).partition(".")[0] for module in modules} <= {*sys.stdlib_module_names, "numpy"}


# Planted faults in the trainer's own code: each function patches one thing, on every rank of both starts of a run


def mean_over_a_replica(patch: Patch) -> None:
    right = Batches.target_count
    patch.setattr(Batches, "target_count", lambda self, step: right(self, step) // self.split.dp_size)


def mean_over_all_tokens(patch: Patch) -> None:
    patch.setattr(Batches, "_count", lambda self, step, _parts: self.schedule.size(step) * self.data.length)


def loss_scale_divided_out_twice(patch: Patch) -> None:
    right = training.train_step.scale_gradients
    patch.setattr(training.train_step, "scale_gradients", lambda params, factor: right(params, factor * factor))


def reported_loss_of_one_replica(patch: Patch) -> None:
    right = StepSums.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[StepSums], world: Any, targets: int, scale: float, loss: Tensor, *rest: Any) -> StepSums:
        return right(cls, world, targets, scale, loss * (world.dp_rank == 0) * world.dp_size, *rest)

    patch.setattr(StepSums, "of", classmethod(of))


def not_clipped(patch: Patch) -> None:
    right = training.train_step.scale_gradients
    patch.setattr(training.train_step, "scale_gradients", lambda params, factor: right(params, 1.0))


def clipped_by_the_norm_of_a_rank(patch: Patch) -> None:
    right = StepSums.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[StepSums], *args: Any) -> StepSums:
        return right(cls, *args)._replace(own_norm=math.sqrt(float(args[4])) / args[2])

    patch.setattr(StepSums, "of", classmethod(of))


def clipped_by_the_norm_before(patch: Patch) -> None:
    right = StepSums.of.__func__  # type: ignore[attr-defined]
    norms = [1.0]

    def of(cls: type[StepSums], *args: Any) -> StepSums:
        sums = right(cls, *args)
        norms.append(sums.own_norm)
        return sums._replace(own_norm=norms[-2])

    patch.setattr(StepSums, "of", classmethod(of))


def gradients_of_the_last_micro_batch(patch: Patch) -> None:
    patch.setattr(Trainer, "_stop_within_step", lambda self: self.optimizer.zero_grad())


def gradients_kept_from_step_to_step(patch: Patch) -> None:
    patch.setattr(Optimizer, "zero_grad", lambda self: None)


def learning_rate_of(number: Callable[[int], int]) -> Fault:
    """A fault: steps have the learning rate of another one."""

    def plant(patch: Patch) -> None:
        right = training.train_step.learning_rate
        patch.setattr(training.train_step, "learning_rate", lambda step, config: right(number(step), config))

    return plant


def learning_rate_begins_again(patch: Patch) -> None:
    """With each start of the processes."""
    right = training.train_step.learning_rate
    steps: list[int] = []

    def rate(step: int, config: Any) -> float:
        steps.append(step)
        return right(step - steps[0], config)

    patch.setattr(training.train_step, "learning_rate", rate)


def decay_ends_late(patch: Patch) -> None:
    right = training.train_step.learning_rate
    patch.setattr(
        training.train_step, "learning_rate", lambda step, config: right(step, replace(config, decay_steps=12))
    )


def a_sequence_too_many_evaluated(patch: Patch) -> None:
    right = Holdouts.__init__

    def more(self: Holdouts, *args: Any, **options: Any) -> None:
        right(self, *args, **options)
        self.counts = {name: count + 1 for name, count in self.counts.items()}

    patch.setattr(Holdouts, "__init__", more)


def repeated_sequences_counted(patch: Patch) -> None:
    """Those that a replica evaluates for the others, who have one more."""
    patch.setattr(training.reporting.holdouts, "IGNORE_INDEX", 5)


def evaluated_with_dropout(patch: Patch) -> None:
    right = Dropout.forward

    def always(self: Dropout, x: Tensor, ids: Tensor | None) -> Tensor:
        was_training = self.training
        self.training = True
        dropped = right(self, x, torch.arange(len(x)) if ids is None else ids)
        self.training = was_training
        return dropped

    patch.setattr(Dropout, "forward", always)


def weights_not_gathered_after_an_update(patch: Patch) -> None:
    right = ParallelModel.start_all_gather
    calls: list[bool] = []

    def once(self: ParallelModel) -> None:
        if not calls:
            right(self)
        calls.append(True)

    patch.setattr(ParallelModel, "start_all_gather", once)


def every_epoch_in_one_order(patch: Patch) -> None:
    right = EpochOrder.at
    patch.setattr(EpochOrder, "at", lambda self, _epoch, positions: right(self, 0, positions))


def replicas_read_the_same(patch: Patch) -> None:
    patch.setattr(
        Batches, "indices", lambda self, first, steps=1: self.global_indices(first, steps, 0, self.split.dp_size)
    )


def batches_overlap(patch: Patch) -> None:
    right = BatchSchedule.place
    patch.setattr(BatchSchedule, "place", lambda self, step: max(0, right(self, step) - 1))


def masks_of_dropout_repeat(patch: Patch) -> None:
    patch.setattr(BatchSchedule, "read", lambda self, step: 0)


def shares_swapped(patch: Patch) -> None:
    right = MixOrder.__init__
    patch.setattr(
        MixOrder, "__init__", lambda self, sizes, weights, seed: right(self, sizes, list(weights)[::-1], seed)
    )


def first_tokens_are_targets(patch: Patch) -> None:
    right = Batches.__init__

    def unmasked(self: Batches, data: Any, *args: Any, **options: Any) -> None:
        data.has_ignored = data.ignores_firsts = False
        right(self, data, *args, **options)

    patch.setattr(Batches, "__init__", unmasked)


def ramp_begins_again(patch: Patch) -> None:
    right = BatchSchedule.plan.__func__  # type: ignore[attr-defined]

    def plan(cls: type[BatchSchedule], before: Any, step: int, ramp: Any, size: int, epoch: int) -> BatchSchedule:
        read = cls(before, epoch).read(step) if before else 0
        return right(cls, before, step, [(each, until + read) for each, until in ramp], size, epoch)

    patch.setattr(BatchSchedule, "plan", classmethod(plan))


def data_begin_again(patch: Patch) -> None:
    right = PrefetchLoader.batch
    steps: list[int] = []

    def batch(self: PrefetchLoader, step: int) -> Any:
        steps.append(step)
        return right(self, step - steps[0])

    patch.setattr(PrefetchLoader, "batch", batch)


def not_loaded(matches: Callable[[str], bool]) -> Fault:
    """A fault: these tensors of a checkpoint are not read."""

    def plant(patch: Patch) -> None:
        right = Trainer._state

        def state(self: Trainer, stored: CheckpointRecord | None = None) -> State:
            found = right(self, stored)
            return found if stored is None else {key: held for key, held in found.items() if not matches(key)}

        patch.setattr(Trainer, "_state", state)

    return plant


def updates_not_counted(patch: Patch) -> None:
    """Those of the start before, by which AdamW corrects its moments."""
    right = Trainer._continue

    def forget(self: Trainer, *args: Any) -> None:
        right(self, *args)
        self.optimizer.updates = 0

    patch.setattr(Trainer, "_continue", forget)


def errors_forgotten(patch: Patch) -> None:
    patch.setattr(ErrorFeedback, "read", lambda self, *_: None)


def moments_halved_in_checkpoints(patch: Patch) -> None:
    right = Trainer._state

    def state(self: Trainer, stored: CheckpointRecord | None = None) -> State:
        found = right(self, stored)
        if stored is not None:
            return found
        halves = {key: [(values / 2, spec) for values, spec in held] for key, held in found.items()}
        return {key: halves[key] if key.startswith("optim.") else held for key, held in found.items()}

    patch.setattr(Trainer, "_state", state)


def weights_of_the_step_before_saved(patch: Patch) -> None:
    step = training.train_step.TrainStep._update
    save = Trainer.save
    before: dict[int, Tensor] = {}

    def update(self: Any, *args: Any) -> None:
        before.update({id(p): p.local.detach().clone() for p in self.model.params})
        step(self, *args)

    @torch.no_grad()
    def stale(self: Trainer, number: int) -> None:
        self.model.finish_all_gather()
        now = [p.local.detach().clone() for p in self.model.params]
        for p in self.model.params:
            p.local.copy_(before[id(p)])
        save(self, number)
        self.checkpoints.wait()
        for p, values in zip(self.model.params, now, strict=True):
            p.local.copy_(values)

    patch.setattr(training.train_step.TrainStep, "_update", update)
    patch.setattr(Trainer, "save", stale)


def a_step_left_out_after_a_resume(patch: Patch) -> None:
    right = Trainer.load

    def load(self: Trainer) -> None:
        right(self)
        self.steps_done += self.steps_done > 0

    patch.setattr(Trainer, "load", load)


ONE, MASKED, MIXED, HALF, RAMPED = DEFAULT
SAME = RunCase.of_layouts("gpt2", ParallelConfig(dp=2, zero=1), ParallelConfig(dp=2, zero=1))
PARTS = RunCase.of_layouts("gpt2", ParallelConfig(dp=1, micro_batches=2), ParallelConfig(dp=1, micro_batches=2))
INT8 = RunCase.of_layouts("gpt2", *[ParallelConfig(dp=2, compression="int8")] * 2)
EXPERTS = RunCase.of_layouts("llama", ParallelConfig(dp=1), ParallelConfig(dp=1), sparse="bias")
LATER = RunCase.of_layouts("gpt2", *[ParallelConfig(dp=2, local_steps=2)] * 2, stop="signal")
LOCAL = RunCase.of_layouts("gpt2", *[ParallelConfig(dp=2, local_steps=3)] * 2)
FAULTS: dict[str, tuple[Fault, RunCase, str]] = {
    "mean over a replica": (mean_over_a_replica, SAME, "gradient"),
    "mean over all tokens": (mean_over_all_tokens, MASKED, "gradient"),
    "loss scale divided out twice": (loss_scale_divided_out_twice, HALF, "weight"),
    "reported loss of one replica": (reported_loss_of_one_replica, SAME, "loss"),
    "not clipped": (not_clipped, ONE, "weight"),
    "clipped by the norm of a rank": (clipped_by_the_norm_of_a_rank, SAME, "weight"),
    "clipped by the norm before": (clipped_by_the_norm_before, ONE, "weight"),
    "gradients of the last micro-batch": (gradients_of_the_last_micro_batch, PARTS, "gradient"),
    "gradients kept from step to step": (gradients_kept_from_step_to_step, ONE, "gradient"),
    "learning rate a step late": (learning_rate_of(lambda step: max(0, step - 1)), RAMPED, "weight"),
    "learning rate a step early": (learning_rate_of(lambda step: step + 1), ONE, "weight"),
    "no warm-up": (learning_rate_of(lambda step: max(1, step)), ONE, "weight"),
    "learning rate begins again": (learning_rate_begins_again, ONE, "weight"),
    "decay ends late": (decay_ends_late, ONE, "weight"),
    "a sequence too many evaluated": (a_sequence_too_many_evaluated, ONE, "loss"),
    "repeated sequences counted": (repeated_sequences_counted, SAME, "loss"),
    "evaluated with dropout": (evaluated_with_dropout, ONE, "loss"),
    "weights not gathered after an update": (weights_not_gathered_after_an_update, SAME, "loss"),
    "every epoch in one order": (every_epoch_in_one_order, ONE, "loss"),
    "replicas read the same": (replicas_read_the_same, SAME, "loss"),
    "batches overlap": (batches_overlap, ONE, "loss"),
    "masks of dropout repeat": (masks_of_dropout_repeat, ONE, "loss"),
    "shares swapped": (shares_swapped, MIXED, "loss"),
    "first tokens are targets": (first_tokens_are_targets, MASKED, "loss"),
    "ramp begins again": (ramp_begins_again, replace(RAMPED, stop="crash"), "loss"),
    "data begin again": (data_begin_again, ONE, "loss"),
    "moments not loaded": (not_loaded(lambda key: key.startswith("optim.")), ONE, "weight"),
    "weights not loaded": (not_loaded(lambda key: "attention" in key), ONE, "weight"),
    "biases of experts not loaded": (not_loaded(lambda key: key.endswith("choice_bias")), EXPERTS, "weight"),
    "outer momentum not loaded": (not_loaded(lambda key: key.startswith("optim.")), LATER, "weight"),
    "replicas' weights not loaded": (not_loaded(lambda key: key.startswith("replica-")), LOCAL, "weight"),
    "updates not counted": (updates_not_counted, ONE, "weight"),
    "errors forgotten": (errors_forgotten, INT8, "weight"),
    "moments halved in checkpoints": (moments_halved_in_checkpoints, ONE, "weight"),
    "a step left out after a resume": (a_step_left_out_after_a_resume, ONE, "weight"),
    "weights of the step before saved": (weights_of_the_step_before_saved, SAME, "weight"),
}  # fmt: skip


def stint_with_fault(name: str, stint: Stint) -> None:
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[name][0](patch)
        run_stint(stint)


@pytest.mark.every(9)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_trainer_turns_red_by_a_finite_difference(certifier: Certifier, name: str) -> None:
    _, chosen, seen_in = FAULTS[name]
    faulty = Certifier(certifier.ranks, stint=partial(stint_with_fault, name))
    faulty._references = certifier._references
    row = faulty.certify(chosen)
    assert not row.error, row.error
    assert not row.passed and limits(chosen)[seen_in] < row.differences[seen_in] < math.inf, row.reason
    assert seen_in in row.reason
