"""Replicas as the training loop sees them: one whose gradients are summed in every step, or several of local steps."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from gristmill.errors import UsageError, require
from training.checkpoint.record import CheckpointRecord
from training.checkpoint.shard_plans import State
from training.checkpoint.shard_storage import model_state
from training.data.batches import Batches
from training.distributed.stop_signals import StopSignals
from training.experimental.local_steps.outer_optimizer import MOMENTUM, OuterOptimizer, mean_over
from training.optim.optim_config import OptimConfig
from training.optim.optimizer import Optimizer
from training.parallel.layout import ParallelConfig
from training.parallel.mesh import OUTER
from training.parallel.parallel_model import ParallelModel

_WEIGHTS = "weights"  # name of a replica's own weights among its states in checkpoints


class Replicas:
    """All ranks train one replica of the weights: what replicas of local steps do is nothing here.

    `count` replicas have weights of their own, of which this rank has those of `rank`. Every rank calls every method.
    """

    count, rank = 1, 0
    note = ""  # what the log says of the start
    has_left = False  # a signal made it leave a meeting of replicas: it is to be saved now

    def __init__(self, model: ParallelModel, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def close(self) -> None:
        """Give back what other processes wait for."""

    def own_targets(self, batches: Batches, step: int) -> int:
        """Targets in the sequences that this replica reads in a step (from 0)."""
        return batches.target_count(step)

    def summed_targets(self, batches: Batches, step: int) -> int:
        """Targets in the sequences that all ranks of this run read in a step (from 0)."""
        return batches.target_count(step)

    def after_step(self, step: int) -> int:
        """End step `step` (from 1), after its update, if there was one; returns the step to go on after."""
        return step

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Context in which every rank's model has the weights that the replicas share."""
        yield

    def state(self, stored: CheckpointRecord | None = None) -> State:
        """What a checkpoint holds of parameters and optimizer, to save it or to fill it from one of record `stored`.

        Raises UsageError for a checkpoint of other replicas, whose states this run cannot take.
        """
        local = stored.layout.get("local_steps", 0) if stored else 0
        require(
            not local,
            f"the checkpoint is of replicas that take {local} local steps, each with moments of its own; give "
            f"--parallel.local_steps {local}, or start from its shared weights with --init_from",
        )
        return model_state(self.model.params, self.optimizer.moments())

    def after_load(self, stored: CheckpointRecord | None, stop: StopSignals) -> int:
        """Go on from what was loaded, from a checkpoint of record `stored` if from one; returns the steps done.

        A signal in `stop`, now or later, ends a wait for other replicas.
        """
        self.stop = stop
        return stored.step if stored else 0

    def record(self) -> dict[str, Any]:
        """What a checkpoint's record has of the replicas, as part of its layout."""
        return {}


class LocalReplicas(Replicas):
    """Replicas that take local steps, and meet after every `local_steps` of them.

    A checkpoint holds the shared weights under the model's names, the outer momentum as one of the optimizer's states,
    and of replica r `replica-r.NAME.STATE`: its weights and the states of its own optimizer.
    """

    def __init__(
        self, layout: ParallelConfig, options: OptimConfig, model: ParallelModel, optimizer: Optimizer
    ) -> None:
        super().__init__(model, optimizer)
        axis = model.world.axis(OUTER)
        self.local_steps, self.count, self.rank = layout.local_steps, axis.size, axis.rank
        self.outer = OuterOptimizer(optimizer.unique, options.outer_lr, options.outer_momentum)
        self._mean = mean_over(axis)

    def own_targets(self, batches: Batches, step: int) -> int:
        return batches.own_target_count(step, self.count)

    @torch.no_grad()
    def after_step(self, step: int) -> int:
        """After every `local_steps` steps average the replicas' weights by an outer step."""
        if step % self.local_steps == 0:
            self.model.finish_publishing()  # what is gathered would overwrite the rows of now
            self.outer.step(self._mean)
            self.optimizer.copy_tied()
            self.model.start_publishing()
        return step

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        self.model.finish_publishing()
        self.outer.swap()
        with torch.no_grad():
            self.optimizer.copy_tied()
        self.model.publish_params()

    def state(self, stored: CheckpointRecord | None = None) -> State:
        if stored is not None and not stored.layout.get("local_steps"):
            return model_state(self.model.params, self.optimizer.moments())
        replica = self.rank if stored is None else self._stored_replica(stored)
        moments = self.optimizer.moments()
        state: State = {}
        for param in self.model.params:
            shared = self.outer.shared.get(param.name, param.local.detach())
            state.setdefault(f"model.{param.name}", []).append((shared, param.spec))
            momentum = self.outer.momenta.get(param.name, param.local.detach())  # of an empty shard
            own = {_WEIGHTS: param.local.detach(), **moments[param.name]}
            state[f"optim.{param.name}.{MOMENTUM}"] = [(momentum, param.spec)]
            state |= {f"replica-{replica}.{param.name}.{key}": [(value, param.spec)] for key, value in own.items()}
        return state

    def _stored_replica(self, stored: CheckpointRecord) -> int:
        """The replica of a checkpoint whose states this one takes: its own, or that of a lower number."""
        before, steps = replicas_of(stored.layout), stored.layout["local_steps"]
        if before != self.count and (taken := stored.step % steps):
            raise UsageError(
                f"the checkpoint of step {stored.step} has {before} replicas that have taken {taken} of {steps} local "
                f"steps, and this run has {self.count}: their number can change where they have the same weights; "
                f"resume with {before} replicas until step {stored.step - taken + steps}, or from a checkpoint of step "
                f"{stored.step - taken}"
            )
        return self.rank % before

    def after_load(self, stored: CheckpointRecord | None, stop: StopSignals) -> int:
        if stored is None or not stored.layout.get("local_steps"):
            self.outer.restart()
        with torch.no_grad():
            self.optimizer.copy_tied()
        return super().after_load(stored, stop)

    def record(self) -> dict[str, Any]:
        return {"local_replicas": self.count}


def replicas_of(layout: Mapping[str, Any]) -> int:
    """Number of replicas with weights of their own, of a layout as a checkpoint's record has it."""
    return int(layout.get("local_replicas", 1))
