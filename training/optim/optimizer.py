"""AdamW and SGD over the shards that a rank updates, and several optimizers as one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from training.optim.flat_buckets import Bucket, ParamsInPlace, ParamsStagedOnCPU
from training.optim.moments import MomentsInMemory, MomentsOnDisk
from training.optim.optim_config import OptimConfig
from training.sharding.sharded_parameter import ShardedParameter

# called with (parameter, start, stop) after those elements of its shard were updated
AfterUpdate = Callable[[ShardedParameter, int, int], None]


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
        """States by parameter name and state name, in the shapes of the local shards.

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


class AdamW(Optimizer):
    """AdamW (Loshchilov & Hutter 2019, algorithm 2); the parts of the model that `config` names decay.

    `moments` stores the states, `values` fetches a bucket's parameters and gradients. Bitwise equal to
    torch.optim.AdamW(fused=True), for any sharding and any buckets.
    """

    def __init__(
        self,
        params: Sequence[ShardedParameter],
        config: OptimConfig,
        buckets: list[Bucket],
        moments: MomentsInMemory | MomentsOnDisk,
        values: ParamsInPlace | ParamsStagedOnCPU,
        after_update: AfterUpdate | None = None,
    ) -> None:
        super().__init__(params, after_update)
        self.config = config
        self.buckets = buckets
        self._moments = moments
        self._values = values
        self._decays = [config.decays(param.name, param.spec.global_shape) for param in self.unique]

    def _update(self, lr: float) -> None:
        self._prefetch(0)
        for index, bucket in enumerate(self.buckets):
            self._prefetch(index + 1)  # overlaps with the update of this one
            tensors = list(zip(*self._values.get(index), *self._moments.get(index), strict=True))
            for decays in (True, False):
                chosen = [t for t, s in zip(tensors, bucket.slices, strict=True) if self._decays[s.param] is decays]
                if chosen:
                    self._fused_adamw(chosen, lr, self.config.weight_decay if decays else 0.0)
            self._values.write_back(index)
            self._moments.write_back(index)
            for s in bucket.slices:
                self.after_update(self.unique[s.param], s.start, s.start + s.numel)
        self._values.finish()
        self._moments.finish()

    def _prefetch(self, index: int) -> None:
        if index < len(self.buckets):
            self._values.prefetch(index)
            self._moments.prefetch(index)

    def _fused_adamw(self, tensors: Sequence[tuple[Tensor, ...]], lr: float, decay: float) -> None:
        """Update tuples of (value, gradient, first moment, second moment) in place, of one dtype and device.

        Calls torch's kernel directly: torch.optim groups tensors by dtype and device at every step, which takes as
        long as the update of a small model.
        """
        values, gradients, first, second = (list(column) for column in zip(*tensors, strict=True))
        # filled on the device: a copy from the CPU would wait for it
        steps = [torch.full((), float(self.updates), device=values[0].device)] * len(values)
        beta1, beta2 = self.config.betas
        torch._fused_adamw_(
            values, gradients, first, second, [], steps, amsgrad=False, maximize=False,
            beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=self.config.eps,
        )  # fmt: skip

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """`exp_avg` and `exp_avg_sq` of every parameter, zeros before the first step.

        On disk, the tensors are memory maps of the files.
        """
        flat = self._moments.flat_states()
        found = {}
        for param in self.params:
            if not param.local.numel():
                found[param.name] = {name: torch.empty_like(param.local.detach()) for name in flat}
        for param, start in zip(self.unique, self._flat_starts(), strict=True):
            shape = param.local.shape
            stop = start + param.local.numel()
            found[param.name] = {name: values[start:stop].view(shape) for name, values in flat.items()}
        return found

    def _flat_starts(self) -> list[int]:
        """Start of each parameter in the flat buffer, in elements."""
        starts: dict[int, int] = {}
        for bucket in self.buckets:
            for s in bucket.slices:
                starts.setdefault(s.param, bucket.start + s.offset)
        return [starts[i] for i in range(len(self.unique))]

    def close(self) -> None:
        self._moments.close()


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


def unique_params(params: Sequence[ShardedParameter]) -> list[ShardedParameter]:
    """The first parameter of each name; those whose shard on this rank is empty are left out."""
    found: dict[str, ShardedParameter] = {}
    for param in params:
        if param.local.numel():
            found.setdefault(param.name, param)
    return list(found.values())
