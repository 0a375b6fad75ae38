"""StepSums: what all ranks have to know of a step before its update, by one all-reduce of a few numbers."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from training.parallel.mesh import World


class StepSums(NamedTuple):
    """Sums of one step, equal on all ranks but for `own_norm`.

    `loss` and `z_loss`: means over the global batch, nats/token; `z_loss` is None if there is none. `grad_norm`: the
    gradient's 2-norm; of ranks with gradients of their own (`World.outer`) the root of their mean square. `own_norm`:
    that of this rank's gradient. `stop`: a rank was asked to stop. `seconds`: the mean of the ranks'.
    """

    loss: float
    grad_norm: float
    own_norm: float
    stop: bool
    z_loss: float | None
    seconds: float = 0.0

    @classmethod
    def of(
        cls, world: World, targets: int, loss_scale: float, loss: Tensor, squares: Tensor, stops: bool = False,
        z_loss: Tensor | None = None, seconds: float = 0.0,
    ) -> "StepSums":  # fmt: skip
        """Sum this rank's terms of the loss, the squared gradient norm and the z-loss, 0-d; collective.

        `targets` of the global batch; gradients are `loss_scale` times those of the loss.
        """
        outer = world.outer
        by_replica = squares.new_zeros(outer.size)
        by_replica[outer.rank] = squares
        local = [loss.double(), torch.full_like(squares, stops), torch.full_like(squares, seconds)]
        local += [] if z_loss is None else [z_loss.double()]
        total, stop, all_seconds, *rest = world.all_reduce(torch.cat([torch.stack(local), by_replica])).tolist()
        squared = rest[-outer.size :]
        return cls(
            loss=total / targets,
            grad_norm=math.sqrt(sum(squared) / len(squared)) / loss_scale,
            own_norm=math.sqrt(squared[outer.rank]) / loss_scale,
            stop=stop > 0,
            z_loss=None if z_loss is None else rest[0] / targets,
            seconds=all_seconds / world.size,
        )
