"""TrainStep: one step of training: forward, backward, the sums over all ranks, and the update if the step is good."""

import time
from collections.abc import Callable
from typing import NamedTuple

from training.data.batches import TargetCounts
from training.model.batch import TokenBatch
from training.optim.optim_config import OptimConfig, learning_rate
from training.optim.optimizer import Optimizer
from training.optim.stability import Stability
from training.parallel.gradients import scale_gradients, squared_grad_norm
from training.parallel.parallel_model import ParallelModel
from training.plugin import Plugins
from training.step_sums import StepSums


class TakenStep(NamedTuple):
    """A step that was taken: its learning rate, and its sums over all ranks."""

    lr: float
    sums: StepSums


class TrainStep:
    """Takes the steps of a run: the trainer's, and those of the parity certificate.

    Every rank calls every method. `config` has the learning rate and the largest gradient norm.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: Optimizer,
        config: OptimConfig,
        stability: Stability,
        plugins: Plugins,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.stability = stability
        self.plugins = plugins

    def take(
        self,
        step: int,
        batch: TokenBatch,
        targets: TargetCounts,
        stops: Callable[[], bool] = lambda: False,
        started: float = 0.0,
    ) -> TakenStep:
        """Take step `step` (from 1) on this rank's `batch`; all ranks skip the update if loss or gradients are bad.

        `stops`: whether this rank was asked to stop, which is asked after the backward pass. `started`: when the step
        began, by `time.perf_counter`. Raises UsageError if `stability` ends the run.
        """
        lr = learning_rate(step - 1, self.config)
        loss_scale = self.stability.scale
        scale = loss_scale / targets.averaged
        self.plugins.before_backward(batch, scale)
        with self.plugins.phase("backward"):
            local_loss = self.model.forward_backward(batch, scale)
        squared_norm = squared_grad_norm(self.model.params, self.model.world.device)
        z_loss = self.model.take_z_loss()
        seconds = time.perf_counter() - started
        sums = StepSums.of(
            self.model.world, targets.read, loss_scale, local_loss, squared_norm, stops(), z_loss, seconds
        )  # fmt: skip
        if self.stability.accepts(step, sums.loss, sums.grad_norm):
            self._update(lr, loss_scale, sums.own_norm)
        self.optimizer.zero_grad()
        return TakenStep(lr, sums)

    def _update(self, lr: float, loss_scale: float, norm: float) -> None:
        """Update the weights by gradients of the loss times `loss_scale`, clipped by their `norm`."""
        longest = self.config.max_grad_norm
        clip_factor = min(1.0, longest / (norm + 1e-6)) if longest else 1.0
        with self.plugins.update(loss_scale):
            scale_gradients(self.model.params, clip_factor / loss_scale)
            self.optimizer.step(lr)
            self.model.start_all_gather()
