"""The outer optimizer of local steps: SGD with Nesterov's momentum on what the replicas' own steps changed (DiLoCo).

Douillard et al. 2023 (arXiv 2311.08105), algorithm 1. All replicas hold the same shared weights S and momentum M. Each
takes H steps of its own from S to its weights W_r; of R replicas the outer gradient is D = sum over r of (S - W_r) / R,

    M = outer_momentum M + D,    S = S - outer_lr (D + outer_momentum M),    W_r = S.

D is all that replicas send one another: as many bytes as gradients have, once in H steps.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from training.parallel.gradients import all_reduce_as_one
from training.sharding.axis import Axis
from training.sharding.sharded_parameter import ShardedParameter

MOMENTUM = "outer_momentum"  # its name among a parameter's states in checkpoints
BUCKET_BYTES = 25 << 20  # of one all-reduce
Mean = Callable[[list[Tensor]], None]
"""Replaces each of the tensors by its mean over the replicas, in place."""


class OuterOptimizer:
    """Shared weights and momentum of the shards that this rank updates: two more copies of them, in their dtype.

    `params`: one of each name.
    """

    def __init__(self, params: Sequence[ShardedParameter], lr: float, momentum: float) -> None:
        self.params = list(params)
        self.lr = lr
        self.momentum = momentum
        self.shared = {param.name: param.local.detach().clone() for param in self.params}
        self.momenta = {name: torch.zeros_like(shared) for name, shared in self.shared.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Begin with the weights of now as shared ones, and no momentum: all replicas have the same."""
        for param in self.params:
            self.shared[param.name].copy_(param.local)
            self.momenta[param.name].zero_()

    @torch.no_grad()
    def step(self, mean: Mean) -> None:
        """Average what the replicas' steps changed, bucket by bucket, and update; all replicas at the same time."""
        for bucket in _buckets(self.params):
            gradients = self.gradients(bucket)
            mean(gradients)
            self.update(gradients, bucket)

    @torch.no_grad()
    def gradients(self, params: Sequence[ShardedParameter] | None = None) -> list[Tensor]:
        """This replica's outer gradients of some parameters, or of all: what its local steps changed, negated."""
        return [self.shared[param.name] - param.local for param in params or self.params]

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor], params: Sequence[ShardedParameter] | None = None) -> None:
        """Update the shared weights by the replicas' mean gradients, which change, and give them to this replica."""
        for param, gradient in zip(params or self.params, gradients, strict=True):
            shared = self.shared[param.name]
            momentum = self.momenta[param.name]
            momentum.mul_(self.momentum).add_(gradient)
            shared.sub_(gradient.add_(momentum, alpha=self.momentum), alpha=self.lr)
            param.local.copy_(shared)

    @torch.no_grad()
    def give_shared(self) -> None:
        """Give the replica the shared weights; what its steps changed since is lost."""
        for param in self.params:
            param.local.copy_(self.shared[param.name])

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange this replica's weights and the shared ones, one parameter at a time."""
        for param in self.params:
            shared = self.shared[param.name]
            kept = param.local.detach().clone()
            param.local.copy_(shared)
            shared.copy_(kept)


def mean_over(axis: Axis) -> Mean:
    """Return the mean over the ranks along `axis`, by an all-reduce of all the tensors as one."""

    def mean(tensors: list[Tensor]) -> None:
        if axis.size > 1:
            all_reduce_as_one(tensors, axis.group)
            for tensor in tensors:
                tensor.div_(axis.size)

    return mean


def _buckets(params: Sequence[ShardedParameter]) -> Iterator[list[ShardedParameter]]:
    """Yield the parameters, in buckets of up to BUCKET_BYTES; a larger one is alone.

    Those that other ranks of a replica hold, too, are apart from the others: in buckets of the same lengths on all
    these ranks, an all-reduce adds each of their elements in the same order, and copies stay equal bit for bit.
    """
    ordered = sorted(params, key=lambda param: param.placement.replicated)
    for _, alike in groupby(ordered, key=lambda param: (param.placement.replicated, param.local.dtype)):
        bucket: list[ShardedParameter] = []
        size = 0
        for param in alike:
            if bucket and size + param.local.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
                size = 0
            bucket.append(param)
            size += param.local.nbytes
        yield bucket
