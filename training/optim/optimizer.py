"""Optimizers over the shards that a rank updates: their base class, several as one, and plain SGD."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from training.memory.memory_config import MemoryConfig
from training.optim.flat_buckets import BUCKET_NUMEL
from training.optim.optim_config import OptimConfig, part_of
from training.sharding.axis import JointAxis
from training.sharding.sharded_parameter import ShardedParameter

# called with (parameter, start, stop) after those elements of its shard were updated
AfterUpdate = Callable[[ShardedParameter, int, int], None]


@dataclass(frozen=True)
class OptimizerContext:
    """What optimizers are built from besides their parameters; see `build_optimizer`."""

    config: OptimConfig
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    rank: int = 0
    bucket_numel: int = BUCKET_NUMEL
    after_update: AfterUpdate | None = None
    holders: Callable[[Sequence[ShardedParameter]], JointAxis] = lambda _: JointAxis()


class Optimizer:
    """Base class: updates the shards that this rank owns by their gradients.

    Parameters of one name (a tied matrix on two pipeline stages) share one state: the first is updated and copied
    to the others. Every non-empty parameter needs a gradient.
    """

    def __init__(self, params: Sequence[ShardedParameter], after_update: AfterUpdate | None = None) -> None:
        self.params = list(params)
        self.after_update = after_update or (lambda *_: None)
        self.updates = 0
        """Steps taken; to be set when states are loaded."""
        self.unique = unique_params(params)
        first = {param.name: param for param in self.unique}
        pairs = [(param, first[param.name]) for param in self.params if param.local.numel()]
        self._tied = [(copy, source) for copy, source in pairs if copy.local is not source.local]
        assert all(copy.spec == source.spec for copy, source in self._tied), "tied parameters with different shards"

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update all parameters with learning rate `lr`."""
        for param in self.unique:
            assert param.local.grad is not None, f"{param.name} has no gradient"
        self.updates += 1
        self._update(lr)
        self.copy_tied()

    def copy_tied(self) -> None:
        """Copy each tied parameter to its other copies on this rank."""
        for copy, source in self._tied:
            copy.local.detach().copy_(source.local)
            self.after_update(copy, 0, copy.local.numel())

    def _update(self, lr: float) -> None:
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Drop all gradients and free their memory."""
        for param in self.params:
            param.local.grad = param.module_param.grad = None

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the states by parameter name and state name, in the shapes of the local shards.

        To load states, write to these tensors.
        """
        return {param.name: {} for param in self.params}

    def close(self) -> None:
        """Remove the states' files."""


class SGD(Optimizer):
    """Plain SGD, w - lr * gradient: no momentum, no weight decay, no state."""

    def _update(self, lr: float) -> None:
        for param in self.unique:
            assert param.local.grad is not None
            param.local.sub_(param.local.grad, alpha=lr)
            self.after_update(param, 0, param.local.numel())


def build_sgd(params: Sequence[ShardedParameter], context: OptimizerContext) -> SGD:
    """Build plain SGD."""
    return SGD(params, context.after_update)


class OptimizerByPart(Optimizer):
    """Several optimizers, each of some of the parameters, as one."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        super().__init__([param for part in parts for param in part.params])

    def step(self, lr: float) -> None:
        for part in self.parts:
            part.updates = self.updates
            part.step(lr)
        self.updates += 1

    def moments(self) -> dict[str, dict[str, Tensor]]:
        moments = dict[str, dict[str, Tensor]]()
        for part in self.parts:
            moments |= part.moments()
        return moments

    def close(self) -> None:
        for part in self.parts:
            part.close()


def split_matrices(
    params: Sequence[ShardedParameter],
) -> tuple[list[list[ShardedParameter]], list[ShardedParameter]]:
    """Return the matrices of blocks, experts' apart from others, and all other parameters."""
    matrices = defaultdict[int, list[ShardedParameter]](list)  # by their dimensions
    others = []
    for param in params:
        shape = param.spec.global_shape
        if part_of(param.name, shape) == "hidden":
            matrices[len(shape)].append(param)
        else:
            others.append(param)
    return list(matrices.values()), others


def unique_params(params: Sequence[ShardedParameter]) -> list[ShardedParameter]:
    """Return the first parameter of each name; those whose shard on this rank is empty are left out."""
    by_name: dict[str, ShardedParameter] = {}
    for param in params:
        if param.local.numel():
            by_name.setdefault(param.name, param)
    return list(by_name.values())
