"""AdamW and SGD over what a process updates, wherever its states are; the learning rate as a function of the step."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from training.memory.memory_config import MemoryConfig
from training.optim.flat_buckets import BUCKET, Bucket, InPlace, Staged, plan
from training.optim.moments import Moments, MomentsInMemory, MomentsOnDisk
from training.optim.optim_config import OptimConfig
from training.sharding.sharded_parameter import ShardedParameter

AfterUpdate = Callable[[ShardedParameter, int, int], None]  # a param, of which elements start … stop are updated


class Optimizer:
    """What updates `params` by their gradients.

    A name that occurs twice (a tied matrix that two stages hold) has one state: the first is updated, the
    second becomes its copy. Every other param that is not empty must have a gradient.
    """

    def __init__(self, params: Sequence[ShardedParameter], after_update: AfterUpdate | None = None) -> None:
        self.params = list(params)
        self.after_update = after_update or (lambda *_: None)
        self.updates = 0
        """Steps taken; to be set when states are loaded."""
        self.updated = first_of_each(params)
        first = {param.name: param for param in self.updated}
        pairs = [(p, first[p.name]) for p in self.params if p.local.numel()]
        self._copies = [(copy, of) for copy, of in pairs if copy.local is not of.local]
        assert all(copy.spec == of.spec for copy, of in self._copies), "one name, two different shards"

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the params at this learning rate."""
        for param in self.updated:
            assert param.local.grad is not None, f"no gradient reached {param.name}"
        self.updates += 1
        self._update(rate)
        for copy, of in self._copies:
            copy.local.copy_(of.local)
            self.after_update(copy, 0, copy.local.numel())

    def _update(self, rate: float) -> None:
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Forget the gradients, and give their memory back."""
        for param in self.params:
            param.local.grad = param.module_param.grad = None

    @property
    def memory_bytes(self) -> int:
        """What the states take of memory, in bytes; files not counted."""
        return 0

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """By parameter and state: tensors of the own shards' shapes, to be read, or written and then `loaded`."""
        return {param.name: {} for param in self.params}

    def loaded(self) -> None:
        """To be called after what `moments` returned was written, by every process."""

    def close(self) -> None:
        """Remove what was kept in files. The states are gone then."""


class SGD(Optimizer):
    """w - rate * gradient: no momentum, no decay, no state."""

    def _update(self, rate: float) -> None:
        for param in self.updated:
            assert param.local.grad is not None
            param.local.sub_(param.local.grad, alpha=rate)
            self.after_update(param, 0, param.local.numel())


class AdamW(Optimizer):
    """Loshchilov & Hutter 2019, algorithm 2; matrices decay, norms and biases do not.

    `moments` says where the states are, `values` where parameters and gradients are while a bucket is
    updated. Bit for bit what torch.optim.AdamW(fused=True) computes, however the elements are divided.
    """

    def __init__(
        self,
        params: Sequence[ShardedParameter],
        config: OptimConfig,
        buckets: list[Bucket],
        moments: Moments,
        values: InPlace | Staged,
        after_update: AfterUpdate | None = None,
    ) -> None:
        super().__init__(params, after_update)
        self.config, self.buckets = config, buckets
        self._moments, self._values = moments, values
        self._decays = [len(param.spec.shape) >= 2 for param in self.updated]

    def _update(self, rate: float) -> None:
        self._begin(0)
        for number, bucket in enumerate(self.buckets):
            self._begin(number + 1)  # while this one is computed
            tensors = list(zip(*self._values.take(number), *self._moments.take(number), strict=True))
            for decays in (True, False):
                chosen = [t for t, cut in zip(tensors, bucket.cuts, strict=True) if self._decays[cut.param] is decays]
                if chosen:
                    self._compute(chosen, rate, self.config.weight_decay if decays else 0.0)
            self._values.put(number)
            self._moments.put(number)
            for cut in bucket.cuts:
                self.after_update(self.updated[cut.param], cut.start, cut.start + cut.length)
        self._values.finish()
        self._moments.finish()

    def _begin(self, number: int) -> None:
        if number < len(self.buckets):
            self._values.begin(number)
            self._moments.begin(number)

    def _compute(self, tensors: Sequence[tuple[Tensor, ...]], rate: float, decay: float) -> None:
        """Update values by gradients and both moments, of one type and on one device; as torch.optim calls it, but
        that sorts by type and device at every step, which takes as long as to update a small model."""
        values, gradients, first, second = (list(column) for column in zip(*tensors, strict=True))
        steps = [torch.tensor(float(self.updates), device=values[0].device)] * len(values)
        beta1, beta2 = self.config.betas
        torch._fused_adamw_(
            values, gradients, first, second, [], steps, amsgrad=False, maximize=False,
            beta1=beta1, beta2=beta2, lr=rate, weight_decay=decay, eps=self.config.eps,
        )  # fmt: skip

    @property
    def memory_bytes(self) -> int:
        return self._moments.memory_bytes

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """`exp_avg` and `exp_avg_sq` of every parameter, zeros before the first step.

        On disk, they map the files: reading them takes no memory that the system could not take back.
        Raises InputError where a file was damaged.
        """
        flat = self._moments.whole()
        found = {}
        for param in self.params:
            if not param.local.numel():
                found[param.name] = {name: torch.empty_like(param.local.detach()) for name in flat}
        for param, at in zip(self.updated, self._offsets(), strict=True):
            shape, stop = param.local.shape, at + param.local.numel()
            found[param.name] = {name: values[at:stop].view(shape) for name, values in flat.items()}
        return found

    def _offsets(self) -> list[int]:
        starts: dict[int, int] = {}
        for bucket in self.buckets:
            for cut in bucket.cuts:
                starts.setdefault(cut.param, bucket.start + cut.at)
        return [starts[i] for i in range(len(self.updated))]

    def loaded(self) -> None:
        self._moments.renew()

    def close(self) -> None:
        self._moments.close()


def build_optimizer(
    params: Sequence[ShardedParameter],
    config: OptimConfig,
    memory: MemoryConfig | None = None,
    rank: int = 0,
    bucket: int = BUCKET,
    after_update: AfterUpdate | None = None,
) -> Optimizer:
    """The optimizer that `config` names, with its states where `memory` says.

    Files are in memory.folder/rank-00000 and so on; `bucket` is how many elements of each state are in memory
    at a time then. `after_update` is called when a param, or part of it, is updated: its parts in order.
    Raises OutputError where the disk has no room for the files.
    """
    if config.name == "sgd":
        return SGD(params, after_update)
    memory = memory or MemoryConfig()
    updated = first_of_each(params)
    kinds = {(param.local.dtype, param.local.device) for param in updated} or {(torch.float32, torch.device("cpu"))}
    assert len(kinds) == 1, f"the params differ in type or place: {kinds}"
    dtype, device = kinds.pop()
    staged = memory.optimizer != "device" and device.type != "cpu"
    divided = staged or memory.optimizer == "disk" or after_update is not None
    total, buckets = plan([param.local.numel() for param in updated], bucket if divided else None)
    moments: Moments
    if memory.optimizer == "disk":
        assert memory.folder is not None, "the caller decides where files are"
        moments = MomentsOnDisk(memory.folder / f"rank-{rank:05d}", total, buckets, dtype)
    else:
        moments = MomentsInMemory(total, buckets, dtype, torch.device("cpu") if staged else device)
    values = Staged(updated, buckets, dtype) if staged else InPlace(updated, buckets)
    return AdamW(params, config, buckets, moments, values, after_update)


def first_of_each(params: Sequence[ShardedParameter]) -> list[ShardedParameter]:
    """The first of those that have one name, without those that are empty."""
    found: dict[str, ShardedParameter] = {}
    for param in params:
        if param.local.numel():
            found.setdefault(param.name, param)
    return list(found.values())
