"""AdamW and SGD over what a process updates, wherever its states are; the learning rate as a function of the step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from training.memory.memory_config import MemoryConfig
from training.optim.flat_buckets import BUCKET, Bucket, InPlace, Staged, plan
from training.optim.moments import Moments, MomentsInMemory, MomentsOnDisk
from training.sharding.weight import Weight

AfterUpdate = Callable[[Weight, int, int], None]  # a weight, of which elements start … stop are updated


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning rate: linear warm-up, then half a cosine."""

    name: Literal["adamw", "sgd"] = "adamw"
    """sgd: plain, without momentum or decay; its updates show every error in a gradient's scale."""
    steps: int = 1000
    lr: float = 1e-3
    """The highest learning rate, at the end of the warm-up."""
    min_lr: float = 1e-4
    """The learning rate of the last step."""
    warmup_steps: int = 50
    weight_decay: float = 0.1
    """Applied to matrices only."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    """Longest gradient, by its 2-norm over all parameters; 0: any length."""


class Optimizer:
    """What updates `weights` by their gradients.

    A name that occurs twice (a tied matrix that two stages hold) has one state: the first is updated, the
    second becomes its copy. Every other weight that is not empty must have a gradient.
    """

    def __init__(self, weights: Sequence[Weight], after_update: AfterUpdate | None = None) -> None:
        self.weights = list(weights)
        self.after_update = after_update or (lambda *_: None)
        self.updates = 0
        """Steps taken; to be set when states are loaded."""
        self.updated = first_of_each(weights)
        first = {weight.name: weight for weight in self.updated}
        pairs = [(w, first[w.name]) for w in self.weights if w.own.numel()]
        self._copies = [(copy, of) for copy, of in pairs if copy.own is not of.own]
        assert all(copy.piece == of.piece for copy, of in self._copies), "one name, two different pieces"

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the weights at this learning rate."""
        for weight in self.updated:
            assert weight.own.grad is not None, f"no gradient reached {weight.name}"
        self.updates += 1
        self._update(rate)
        for copy, of in self._copies:
            copy.own.copy_(of.own)
            self.after_update(copy, 0, copy.own.numel())

    def _update(self, rate: float) -> None:
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Forget the gradients, and give their memory back."""
        for weight in self.weights:
            weight.own.grad = weight.full.grad = None

    @property
    def memory_bytes(self) -> int:
        """What the states take of memory, in bytes; files not counted."""
        return 0

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """By parameter and state: tensors of the own pieces' shapes, to be read, or written and then `loaded`."""
        return {weight.name: {} for weight in self.weights}

    def loaded(self) -> None:
        """To be called after what `moments` returned was written, by every process."""

    def close(self) -> None:
        """Remove what was kept in files. The states are gone then."""


class SGD(Optimizer):
    """w - rate * gradient: no momentum, no decay, no state."""

    def _update(self, rate: float) -> None:
        for weight in self.updated:
            assert weight.own.grad is not None
            weight.own.sub_(weight.own.grad, alpha=rate)
            self.after_update(weight, 0, weight.own.numel())


class AdamW(Optimizer):
    """Loshchilov & Hutter 2019, algorithm 2; matrices decay, norms and biases do not.

    `moments` says where the states are, `values` where parameters and gradients are while a bucket is
    updated. Bit for bit what torch.optim.AdamW(fused=True) computes, however the elements are divided.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        config: OptimConfig,
        buckets: list[Bucket],
        moments: Moments,
        values: InPlace | Staged,
        after_update: AfterUpdate | None = None,
    ) -> None:
        super().__init__(weights, after_update)
        self.config, self.buckets = config, buckets
        self._moments, self._values = moments, values
        self._decays = [len(weight.piece.shape) >= 2 for weight in self.updated]

    def _update(self, rate: float) -> None:
        self._begin(0)
        for number, bucket in enumerate(self.buckets):
            self._begin(number + 1)  # while this one is computed
            tensors = list(zip(*self._values.take(number), *self._moments.take(number), strict=True))
            for decays in (True, False):
                chosen = [t for t, cut in zip(tensors, bucket.cuts, strict=True) if self._decays[cut.weight] is decays]
                if chosen:
                    self._compute(chosen, rate, self.config.weight_decay if decays else 0.0)
            self._values.put(number)
            self._moments.put(number)
            for cut in bucket.cuts:
                self.after_update(self.updated[cut.weight], cut.start, cut.start + cut.length)
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
        for weight in self.weights:
            if not weight.own.numel():
                found[weight.name] = {name: torch.empty_like(weight.own.detach()) for name in flat}
        for weight, at in zip(self.updated, self._offsets(), strict=True):
            shape, stop = weight.own.shape, at + weight.own.numel()
            found[weight.name] = {name: values[at:stop].view(shape) for name, values in flat.items()}
        return found

    def _offsets(self) -> list[int]:
        starts: dict[int, int] = {}
        for bucket in self.buckets:
            for cut in bucket.cuts:
                starts.setdefault(cut.weight, bucket.start + cut.at)
        return [starts[i] for i in range(len(self.updated))]

    def loaded(self) -> None:
        self._moments.renew()

    def close(self) -> None:
        self._moments.close()


def build_optimizer(
    weights: Sequence[Weight],
    config: OptimConfig,
    memory: MemoryConfig | None = None,
    rank: int = 0,
    bucket: int = BUCKET,
    after_update: AfterUpdate | None = None,
) -> Optimizer:
    """The optimizer that `config` names, with its states where `memory` says.

    Files are in memory.folder/rank-00000 and so on; `bucket` is how many elements of each state are in memory
    at a time then. `after_update` is called when a weight, or part of it, is updated: its parts in order.
    Raises OutputError where the disk has no room for the files.
    """
    if config.name == "sgd":
        return SGD(weights, after_update)
    memory = memory or MemoryConfig()
    updated = first_of_each(weights)
    kinds = {(weight.own.dtype, weight.own.device) for weight in updated} or {(torch.float32, torch.device("cpu"))}
    assert len(kinds) == 1, f"the weights differ in type or place: {kinds}"
    dtype, device = kinds.pop()
    staged = memory.optimizer != "device" and device.type != "cpu"
    divided = staged or memory.optimizer == "disk" or after_update is not None
    total, buckets = plan([weight.own.numel() for weight in updated], bucket if divided else None)
    moments: Moments
    if memory.optimizer == "disk":
        assert memory.folder is not None, "the caller decides where files are"
        moments = MomentsOnDisk(memory.folder / f"rank-{rank:05d}", total, buckets, dtype)
    else:
        moments = MomentsInMemory(total, buckets, dtype, torch.device("cpu") if staged else device)
    values = Staged(updated, buckets, dtype) if staged else InPlace(updated, buckets)
    return AdamW(weights, config, buckets, moments, values, after_update)


def first_of_each(weights: Sequence[Weight]) -> list[Weight]:
    """The first of those that have one name, without those that are empty."""
    found: dict[str, Weight] = {}
    for weight in weights:
        if weight.own.numel():
            found.setdefault(weight.name, weight)
    return list(found.values())


def learning_rate(step: int, config: OptimConfig) -> float:
    """The learning rate of step 0, 1, … steps - 1.

    >>> config = OptimConfig(steps=10, lr=1.0, min_lr=0.1, warmup_steps=2)
    >>> [round(learning_rate(step, config), 3) for step in (0, 1, 2, 9)]
    [0.5, 1.0, 0.966, 0.1]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step + 1 - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
