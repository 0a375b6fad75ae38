"""MeetingReplicas: a replica that is a run of its own, and meets the others in a folder after its local steps."""

import json
from typing import Any

import torch
from torch import Tensor

from training.checkpoint.record import CheckpointRecord
from training.data.batches import Batches
from training.distributed.mesh import main_only
from training.optim.optim_config import OptimConfig
from training.optim.optimizer import Optimizer
from training.parallel.parallel_model import ParallelModel
from training.replicas.meeting import Meeting
from training.replicas.meeting_config import MeetingConfig
from training.replicas.outer_optimizer import OuterOptimizer
from training.replicas.replicas import LocalReplicas


class MeetingReplicas(LocalReplicas):
    """One of `config.count` replicas; all ranks of this run train it, as any layout does.

    Where others went on without it, it takes their shared weights and their step, and keeps its moments.
    """

    def __init__(
        self, config: MeetingConfig, options: OptimConfig, model: ParallelModel, optimizer: Optimizer, run: str
    ) -> None:
        """`run`: what all replicas must have in common. Raises UsageError for the folder of another run."""
        self.model, self.optimizer, self.config = model, optimizer, config
        self.local_steps, self.count, self.rank = config.local_steps, 1, 0
        self.outer = OuterOptimizer(optimizer.unique, options.outer_lr, options.outer_momentum)
        self.meeting = Meeting(config, model.world.rank, model.world.size, main_only)
        self.meeting.join(run)
        self.steps = options.steps

    def own_targets(self, batches: Batches, step: int) -> int:
        return batches.own_target_count(step, self.config.count)

    def summed_targets(self, batches: Batches, step: int) -> int:
        """This run sums the losses of this replica alone."""
        return self.own_targets(batches, step)

    @torch.no_grad()
    def after_step(self, step: int) -> int:
        """After every `local_steps` steps meet the others; returns the step to go on after."""
        if step % self.local_steps:
            return step
        self.model.finish_publishing()
        if (last := self.meeting.last_shared()) >= step // self.local_steps:
            step = self._follow(last)
        else:
            self._meet(step // self.local_steps)
        self.optimizer.copy_tied()
        self.model.start_publishing()
        return step

    def _meet(self, number: int) -> None:
        gradients = self.outer.gradients()
        members = self.meeting.exchange(number, gradients)
        self.outer.update(gradients)
        if self.config.number not in members:
            self.meeting.announce(number + 1)
        if members[0] == self.config.number:
            self.meeting.write_shared(number, self._shared())

    def _follow(self, number: int) -> int:
        """Take the weights that the others shared after round `number`; returns its step."""
        self.meeting.read_shared(number, self._shared())
        self.outer.give_shared()
        if number * self.local_steps < self.steps:
            self.meeting.announce(number + 1)
        return number * self.local_steps

    def _shared(self) -> list[Tensor]:
        return [*self.outer.shared.values(), *self.outer.momenta.values()]

    @torch.no_grad()
    def after_load(self, stored: CheckpointRecord | None) -> int:
        super().after_load(stored)
        step, last = stored.step if stored else 0, self.meeting.last_shared()
        if step < last * self.local_steps < self.steps:
            step = self._follow(last)
            self.optimizer.copy_tied()
        elif step < self.steps:
            self.meeting.announce(step // self.local_steps + 1)
        return step

    def record(self) -> dict[str, Any]:
        return {"local_steps": self.local_steps, "local_replicas": 1}


def common_to_all(identity: dict[str, Any], layout: dict[str, Any]) -> str:
    """What replicas of one run have in common, of the identity of a run and its layout: as text."""
    own = {key: value for key, value in identity.items() if key != "replicas.number"}
    return json.dumps({**own, "layout": layout}, sort_keys=True, default=str)
