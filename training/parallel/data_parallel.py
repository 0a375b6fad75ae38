"""Data parallelism: replicas of the model, whose gradients are summed in buckets while they are computed.

ZeRO (Rajbhandari et al. 2020) divides by rows what replicas would each hold: stage 1 the optimizer's state,
stage 2 the gradients too. Stage 3 is FSDP's (see fsdp.py).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.distributed.collectives import all_gather, reduce_scatter
from training.distributed.hang_detection import wait
from training.distributed.mesh import Axis
from training.sharding.shard_spec import shard_range

BUCKET_BYTES = 25 << 20  # large enough to fill a link, small enough to overlap


class Bucket:
    """Parameters whose gradients travel together; `rows[i]` are those of parameter i that this process updates.

    What travels is laid out as (processes along `shard`, L): row r holds everyone's rows for process r,
    padded to the same length, so that one reduce-scatter gives each process what it updates.
    """

    def __init__(self, full: list[nn.Parameter], own: list[nn.Parameter], shard: Axis, replicate: Axis) -> None:
        self.full, self.own, self.shard, self.replicate = full, own, shard, replicate
        self.lengths = [-(-len(p) // shard.size) * (p.numel() // len(p)) for p in full]
        self.waiting = len(full)
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None

    def start(self, release: bool) -> None:
        """Begin to sum the gradients; `release` those that were computed here."""
        assert self._flat is None
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.full]
        flat = self._pack(grads)
        if release:
            for p in self.full:
                p.grad = None
        if self.shard.size == 1:
            self._flat = flat[0]
            self._work = dist.all_reduce(self._flat, group=self.replicate.group, async_op=True)
        else:
            self._flat = torch.empty_like(flat[0])
            self._work = reduce_scatter(self._flat, flat.flatten(), group=self.shard.group, async_op=True)

    def finish(self) -> None:
        """Wait for the sums, and add them to the gradients of what this process updates."""
        assert self._flat is not None and self._work is not None
        wait(self._work, self.replicate.group if self.shard.size == 1 else self.shard.group)
        if self.shard.size > 1 and self.replicate.size > 1:
            dist.all_reduce(self._flat, group=self.replicate.group)
        for own, values in zip(self.own, self._flat.split(self.lengths), strict=True):
            grad = values[: own.numel()].view_as(own)
            own.grad = grad if own.grad is None or self.shard.size == 1 else own.grad + grad
        self._flat = self._work = None

    def all_gather_params(self) -> None:
        """Send everyone the rows that this process has updated, and take theirs."""
        own = zip(self.own, self.lengths, strict=True)
        mine = torch.cat([nn.functional.pad(p.detach().flatten(), (0, n - p.numel())) for p, n in own])
        everyone = mine.new_empty(self.shard.size, len(mine))
        all_gather(everyone.flatten(), mine, group=self.shard.group)
        for p, values in zip(self.full, everyone.split(self.lengths, dim=1), strict=True):
            p.detach().copy_(values.flatten()[: p.numel()].view_as(p))

    def _pack(self, grads: Sequence[Tensor]) -> Tensor:
        parts = self.shard.size
        pairs = zip(grads, self.lengths, strict=True)
        padded = [nn.functional.pad(g.flatten(), (0, parts * n - g.numel())).view(parts, n) for g, n in pairs]
        return torch.cat(padded, dim=1)


class GradReducer:
    """The replicas that a process's parameters have elsewhere, and the traffic between them."""

    def __init__(self, full: Sequence[nn.Parameter], shard: Axis, replicate: Axis, zero: int) -> None:
        self.zero, self.shard = zero, shard
        self.own = {id(p): _own_rows(p, shard) for p in full}
        alone = shard.size == replicate.size == 1
        groups = [] if alone else _by_size(list(reversed(full)))  # gradients come in reverse
        self.buckets = [Bucket(group, [self.own[id(p)] for p in group], shard, replicate) for group in groups]
        self._place = {id(p): bucket for bucket in self.buckets for p in bucket.full}
        self._started, self._grad_sync = 0, False
        for bucket in self.buckets:
            for p in bucket.full:
                p.register_post_accumulate_grad_hook(self._ready)

    def enable_grad_sync(self) -> None:
        """Reduce each bucket as soon as the next backward pass, the last before `finish_grad_sync`, has filled it."""
        self._grad_sync = True
        for bucket in self.buckets:
            bucket.waiting = len(bucket.full)

    def finish_grad_sync(self) -> None:
        """Sum what has not been sent yet, and wait for all."""
        for bucket in self.buckets[self._started :]:
            bucket.start(self.zero >= 2)
        for bucket in self.buckets:
            bucket.finish()
        self._started, self._grad_sync = 0, False

    def all_gather_params(self) -> None:
        """After the update: make the parameters whole again on every process."""
        if self.shard.size > 1:
            for bucket in self.buckets:
                bucket.all_gather_params()

    def _ready(self, p: Tensor) -> None:
        if not self._grad_sync:
            return
        self._place[id(p)].waiting -= 1
        # in their order, whatever the order in which they fill: all processes must send the same one
        while self._started < len(self.buckets) and self.buckets[self._started].waiting == 0:
            self.buckets[self._started].start(self.zero >= 2)
            self._started += 1


def _own_rows(p: nn.Parameter, shard: Axis) -> nn.Parameter:
    """A view of the rows that this process updates; the parameter itself where it is not divided."""
    if shard.size == 1:
        return p
    start, stop = shard_range(len(p), shard.size, shard.rank)
    return nn.Parameter(p.detach()[start:stop], requires_grad=False)


def _by_size(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Neighbours of one dtype, of about BUCKET_BYTES together."""
    groups: list[list[nn.Parameter]] = []
    size = BUCKET_BYTES
    for p in parameters:
        if size + p.nbytes > BUCKET_BYTES or groups[-1][0].dtype != p.dtype:
            groups.append([])
            size = 0
        groups[-1].append(p)
        size += p.nbytes
    return groups
