"""Weight average: an exponential moving average of the weights, kept with any optimizer's states (EMA)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from training.optim.optimizer import Optimizer, OptimizerByPart

AVERAGE = "ema"  # its name among the states of a parameter


class AveragingOptimizer(OptimizerByPart):
    """An optimizer after each of whose steps A = decay A + (1 - decay) W; A starts as the initial weights.

    The average (Polyak & Juditsky 1992) has the weights' shards and dtype, and is one of their states in checkpoints.
    """

    def __init__(self, optimizer: Optimizer, decay: float) -> None:
        super().__init__([optimizer])
        self.decay = decay
        self._weights = [param.local.detach() for param in self.unique]
        self._averages = [weight.clone() for weight in self._weights]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self._start()
        super().step(lr)
        if self._weights:
            torch._foreach_lerp_(self._averages, self._weights, 1 - self.decay)

    def _start(self) -> None:
        """Before the first step: weights may have been loaded since the average was made."""
        if not self.updates:
            for average, weight in zip(self._averages, self._weights, strict=True):
                average.copy_(weight)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Context in which the parameters hold the average; in place, with one parameter in memory twice at a time."""
        self._start()
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weight in zip(self._averages, self._weights, strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
        self.copy_tied()

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's states, and the average as one more."""
        self._start()
        moments = super().moments()
        for param in self.params:
            moments[param.name] = {AVERAGE: param.local.detach()} | moments[param.name]  # of an empty shard
        for param, average in zip(self.unique, self._averages, strict=True):
            moments[param.name][AVERAGE] = average
        return moments
