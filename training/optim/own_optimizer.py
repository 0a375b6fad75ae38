"""Own optimizers: the base class of those of the user's file, FILE.py:CLASS, and what updates a rank's shards."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from gristmill.errors import require
from training.optim.adamw import build_adamw
from training.optim.muon import WholeMatrices
from training.optim.optim_config import OptimConfig
from training.optim.optimizer import AfterUpdate, Optimizer, OptimizerByPart, OptimizerContext, split_matrices
from training.own_code import call_own, load_own
from training.sharding.axis import JointAxis
from training.sharding.sharded_parameter import ShardedParameter

_OPTION = "optim.name"


class OwnOptimizer:
    """Base class of an optimizer of yours: W = W - lr (direction + weight_decay W), of the parts that decay.

    Weights, gradients and states are sharded by any layout: `direction` sees a part of a parameter, in any shape, and
    must depend on each element alone. What needs a whole matrix is `of_matrix`.
    """

    states: ClassVar[tuple[str, ...]] = ()
    """Names of the states: a tensor for each parameter, like it and zeros at first. Checkpoints have them by name, and
    the memory that a run needs is counted by them."""
    matrices_only: ClassVar[bool] = False
    """It updates the matrices of blocks, and AdamW all other parameters."""

    def __init__(self, config: OptimConfig) -> None:
        """`config`: the section [optim]."""
        self.config = config

    def direction(self, weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: int) -> Tensor:
        """Return what is subtracted times the learning rate; changes `states` in place, and nothing else.

        `states`: one tensor for each name. `step`: this update's number, from 1.
        """
        raise NotImplementedError

    def of_matrix(self, direction: Tensor) -> Tensor:
        """Return the direction of a whole matrix of the blocks, (m, n), or of several experts', (E, m, n)."""
        return direction


class OwnUpdate(Optimizer):
    """Updates parameters by an optimizer of the user's; their states have their shards and dtype."""

    def __init__(
        self,
        params: Sequence[ShardedParameter],
        config: OptimConfig,
        own: OwnOptimizer,
        holders: JointAxis | None,
        after_update: AfterUpdate | None = None,
    ) -> None:
        """`holders`: the ranks that hold pieces of these matrices, which are gathered; None: no matrix is."""
        super().__init__(params, after_update)
        self.config = config
        self.own = own
        self._states = {param.name: self._zeros(param) for param in self.params}
        self._whole = None if holders is None else WholeMatrices(self.params, holders)

    def _zeros(self, param: ShardedParameter) -> list[Tensor]:
        return [torch.zeros_like(param.local.detach()) for _ in self.own.states]

    def _update(self, lr: float) -> None:
        if self._whole is not None:
            params = self.params
            self._whole.map(
                lambda i: self._direction(params[i]),
                self._of_matrix,
                lambda i, update: self._apply(params[i], update, lr),
            )
            return
        for param in self.unique:
            self._apply(param, self._direction(param), lr)

    def _direction(self, param: ShardedParameter) -> Tensor:
        weight = param.local.detach()
        gradient = param.local.grad
        if gradient is None:  # an empty shard
            return torch.zeros_like(weight)
        states = self._states[param.name]
        call = partial(self.own.direction, weight, gradient, states, self.updates)
        direction: Tensor = call_own(call, self.config.name, _OPTION)
        return direction

    def _of_matrix(self, direction: Tensor) -> Tensor:
        result: Tensor = call_own(lambda: self.own.of_matrix(direction), self.config.name, _OPTION)
        require(
            result.shape == direction.shape and result.dtype == direction.dtype,
            f"{_OPTION}: of_matrix of {self.config.name} made {tuple(result.shape)} {result.dtype} of a matrix "
            f"{tuple(direction.shape)} {direction.dtype}; expected the same shape and type",
        )
        return result

    def _apply(self, param: ShardedParameter, direction: Tensor, lr: float) -> None:
        if self.config.decays(param.name, param.spec.global_shape):
            param.local.mul_(1 - lr * self.config.weight_decay)
        param.local.sub_(direction, alpha=lr)
        self.after_update(param, 0, param.local.numel())

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the states of every parameter by their names, zeros before the first step."""
        return {name: dict(zip(self.own.states, states, strict=True)) for name, states in self._states.items()}


def build_own(params: Sequence[ShardedParameter], context: OptimizerContext) -> Optimizer:
    """Build an optimizer of the user's. Raises UsageError for a class whose direction mixes elements."""
    config = context.config
    kind = load_own(config.name, _OPTION, OwnOptimizer)
    own: OwnOptimizer = call_own(lambda: kind(config), config.name, _OPTION)
    require_elementwise(own, config.name)
    takes_matrices = kind.of_matrix is not OwnOptimizer.of_matrix
    if not (takes_matrices or own.matrices_only):
        return OwnUpdate(params, config, own, None, context.after_update)
    matrices, others = split_matrices(params)
    parts: list[Optimizer] = []
    for part in matrices:
        holders = context.holders(part) if takes_matrices else None
        parts.append(OwnUpdate(part, config, own, holders, context.after_update))
    if own.matrices_only:
        parts.append(build_adamw(others, context))
    else:
        parts.append(OwnUpdate(others, config, own, None, context.after_update))
    return OptimizerByPart(parts)


def require_elementwise(own: OwnOptimizer, name: str) -> None:
    """Raise UsageError unless the direction of a tensor's parts is that of the tensor: layouts would disagree."""
    generator = torch.Generator().manual_seed(1)
    weight, gradient, *states = torch.rand(2 + len(own.states), 2, 3, 4, dtype=torch.float64, generator=generator)
    halves = [[values[n].clone() for values in (weight, gradient, *states)] for n in range(2)]

    def run(values: Sequence[Tensor]) -> list[Tensor]:
        first, second, *others = values
        direction = call_own(lambda: own.direction(first, second, others, 1), name, _OPTION)
        require(
            isinstance(direction, Tensor) and direction.shape == first.shape,
            f"{_OPTION}: direction of {name} returned no tensor of the shape of the weight; expected one",
        )
        return [direction, *others]

    whole = run([weight, gradient, *states])
    first = run(halves[0])
    second = run(halves[1])
    same = all(
        torch.allclose(values, torch.stack(parts), rtol=1e-9, atol=1e-12)
        for values, *parts in zip(whole, first, second, strict=True)
    )
    require(
        same,
        f"{_OPTION}: direction of {name} is another one for a part of a parameter than for the whole: layouts would "
        "train differently; expected one that depends on each element alone; what needs a whole matrix is of_matrix",
    )
