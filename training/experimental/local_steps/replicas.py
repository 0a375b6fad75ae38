"""LocalReplicas: replicas that take optimizer steps of their own, and average their weights after some of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gristmill.errors import UsageError
from gristmill.wording import count_of
from training.checkpoint.record import CheckpointRecord
from training.checkpoint.shard_plans import State
from training.distributed.stop_signals import StopSignals
from training.experimental.local_steps.outer_optimizer import MOMENTUM, OuterOptimizer, mean_over
from training.optim.optim_config import OptimConfig
from training.optim.optimizer import Optimizer
from training.parallel.parallel_model import ParallelModel
from training.plugin import Plugin

_WEIGHTS = "weights"  # name of a replica's own weights among its states in checkpoints


class LocalReplicas(Plugin):
    """Replicas that take local steps, and meet after every `local_steps` of them.

    A checkpoint holds the shared weights under the model's names, the outer momentum as one of the optimizer's states,
    and of replica r `replica-r.NAME.STATE`: its weights and the states of its own optimizer.
    """

    def __init__(self, local_steps: int, options: OptimConfig, model: ParallelModel, optimizer: Optimizer) -> None:
        self.local_steps = local_steps
        self.model = model
        self.optimizer = optimizer
        axis = model.world.outer
        self.count = axis.size
        self.rank = axis.rank
        self.outer = OuterOptimizer(optimizer.unique, options.outer_lr, options.outer_momentum)
        self._mean = mean_over(axis)

    @torch.no_grad()
    def after_step(self, step: int) -> int:
        """After every `local_steps` steps average the replicas' weights by an outer step."""
        if step % self.local_steps == 0:
            self.model.finish_all_gather()  # what is gathered would overwrite the rows of now
            self.outer.step(self._mean)
            self.optimizer.copy_tied()
            self.model.start_all_gather()
        return step

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Context in which every rank's model has the weights that the replicas share."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        self.model.finish_all_gather()
        self.outer.swap()
        with torch.no_grad():
            self.optimizer.copy_tied()
        self.model.all_gather_params()

    def state(self, state: State, stored: CheckpointRecord | None = None) -> State:
        """Return the shared weights and momenta, and this replica's own states.

        Of a run without replicas `state` is all.

        Raises UsageError for a checkpoint of another number of replicas within their local steps.
        """
        if stored is not None and not stored.layout.get("local_steps"):
            return state
        replica = self.rank if stored is None else self._stored_replica(stored)
        moments = self.optimizer.moments()
        state = State()
        for param in self.model.params:
            shared = self.outer.shared.get(param.name, param.local.detach())
            state.setdefault(f"model.{param.name}", []).append((shared, param.spec))
            momentum = self.outer.momenta.get(param.name, param.local.detach())  # of an empty shard
            own = {_WEIGHTS: param.local.detach(), **moments[param.name]}
            state[f"optim.{param.name}.{MOMENTUM}"] = [(momentum, param.spec)]
            state |= {f"replica-{replica}.{param.name}.{key}": [(value, param.spec)] for key, value in own.items()}
        return state

    def _stored_replica(self, stored: CheckpointRecord) -> int:
        """Return the replica of a checkpoint whose states this one takes: its own, or that of a lower number."""
        before = int(stored.layout.get("local_replicas", 1))
        steps = stored.layout["local_steps"]
        if before != self.count and (taken := stored.step % steps):
            raise UsageError(
                f"the checkpoint of step {stored.step} has {count_of(before, 'replica')} after {taken} of "
                f"{steps} local "
                f"steps, and this run has {self.count}: their number can change only where they share weights; "
                f"resume with {count_of(before, 'replica')} until step {stored.step - taken + steps}, or "
                "from a checkpoint of step "
                f"{stored.step - taken}"
            )
        return self.rank % before

    def after_load(self, step: int, stored: CheckpointRecord | None, stop: StopSignals) -> int:  # noqa: ARG002
        if stored is None or not stored.layout.get("local_steps"):
            self.outer.restart()
        with torch.no_grad():
            self.optimizer.copy_tied()
        return step

    def record(self) -> dict[str, Any]:
        return {"local_replicas": self.count}
