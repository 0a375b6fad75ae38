"""Data parallelism: gradients are reduced over the replicas in buckets, during the backward pass (Li et al. 2020).

Ranks along "shard" each update 1 / n of every parameter's rows (ZeRO, Rajbhandari et al. 2020): stage 1 shards the
optimizer state, stage 2 the gradients too; stage 3 is FSDP (fsdp.py). With G bytes of gradients, a step
- without ZeRO all-reduces G over "replicate";
- with ZeRO-1 reduce-scatters G over "shard", and all-gathers the same number of bytes of updated parameters;
- with ZeRO-2 does the same, but reduce-scatters after each micro-batch, so that no full gradient is kept;
- with several groups (hybrid sharding) also all-reduces each rank's G / n over "replicate".
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.distributed.collectives import all_gather, reduce_scatter, wait
from training.distributed.mesh import Axis

BUCKET_BYTES = 25 << 20  # large enough to use a link's bandwidth, small enough to overlap with the backward pass


class GradBucket:
    """Parameters whose gradients one collective reduces; `own[i]`: the shard of `full[i]` that this rank updates.

    The flat buffer is (n, L), n ranks along "shard": row r holds rank r's rows of every parameter, each padded to the
    same length on all ranks, so one reduce-scatter gives each rank the rows that it updates.
    """

    def __init__(self, full: list[nn.Parameter], own: list[nn.Parameter], shard: Axis, replicate: Axis) -> None:
        self.full, self.own, self.shard, self.replicate = full, own, shard, replicate
        self.lengths = [-(-len(p) // shard.size) * (p.numel() // len(p)) for p in full]
        self.pending = len(full)  # parameters whose gradient the backward pass has not computed yet
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None

    def start_reduce(self, release: bool) -> None:
        """Start to reduce the gradients, asynchronously; `release`: free the full gradients."""
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

    def finish_reduce(self) -> None:
        """Wait for the reduced gradients and accumulate them on the shards that this rank updates."""
        assert self._flat is not None and self._work is not None
        wait(self._work, self.replicate.group if self.shard.size == 1 else self.shard.group)
        if self.shard.size > 1 and self.replicate.size > 1:
            dist.all_reduce(self._flat, group=self.replicate.group)
        for own, values in zip(self.own, self._flat.split(self.lengths), strict=True):
            grad = values[: own.numel()].view_as(own)
            own.grad = grad if own.grad is None or self.shard.size == 1 else own.grad + grad
        self._flat = self._work = None

    def all_gather_params(self) -> None:
        """All-gather the updated rows into the full parameters."""
        own = zip(self.own, self.lengths, strict=True)
        mine = torch.cat([nn.functional.pad(p.detach().flatten(), (0, n - p.numel())) for p, n in own])
        gathered = mine.new_empty(self.shard.size, len(mine))
        all_gather(gathered.flatten(), mine, group=self.shard.group)
        for p, values in zip(self.full, gathered.split(self.lengths, dim=1), strict=True):
            p.detach().copy_(values.flatten()[: p.numel()].view_as(p))

    def _pack(self, grads: Sequence[Tensor]) -> Tensor:
        parts = self.shard.size
        pairs = zip(grads, self.lengths, strict=True)
        padded = [nn.functional.pad(g.flatten(), (0, parts * n - g.numel())).view(parts, n) for g, n in pairs]
        return torch.cat(padded, dim=1)


class GradReducer:
    """Reduces the gradients of a rank's parameters over the data-parallel replicas; ZeRO-0 to 2."""

    def __init__(self, full: Sequence[nn.Parameter], shard: Axis, replicate: Axis, zero: int) -> None:
        self.zero, self.shard = zero, shard
        self.own = {id(p): _own_rows(p, shard) for p in full}  # the shard that this rank updates, by full parameter
        alone = shard.size == replicate.size == 1
        groups = [] if alone else _group_by_bytes(list(reversed(full)))  # the order in which gradients are computed
        self.buckets = [GradBucket(group, [self.own[id(p)] for p in group], shard, replicate) for group in groups]
        self._bucket_of = {id(p): bucket for bucket in self.buckets for p in bucket.full}
        self._started, self._grad_sync = 0, False
        for bucket in self.buckets:
            for p in bucket.full:
                p.register_post_accumulate_grad_hook(self._on_grad)

    def enable_grad_sync(self) -> None:
        """Reduce each bucket as soon as the next backward pass has computed its gradients; then `finish_grad_sync`."""
        self._grad_sync = True
        for bucket in self.buckets:
            bucket.pending = len(bucket.full)

    def finish_grad_sync(self) -> None:
        """Reduce the remaining buckets, and wait for all."""
        for bucket in self.buckets[self._started :]:
            bucket.start_reduce(self.zero >= 2)
        for bucket in self.buckets:
            bucket.finish_reduce()
        self._started, self._grad_sync = 0, False

    def all_gather_params(self) -> None:
        """ZeRO-1 and 2, after the update: all-gather the shards into the full parameters."""
        if self.shard.size > 1:
            for bucket in self.buckets:
                bucket.all_gather_params()

    def _on_grad(self, p: Tensor) -> None:
        if not self._grad_sync:
            return
        self._bucket_of[id(p)].pending -= 1
        # in a fixed order and not as buckets fill: collectives must match on all ranks
        while self._started < len(self.buckets) and self.buckets[self._started].pending == 0:
            self.buckets[self._started].start_reduce(self.zero >= 2)
            self._started += 1


def _own_rows(p: nn.Parameter, shard: Axis) -> nn.Parameter:
    """A view of the rows that this rank updates; `p` itself where nothing is sharded."""
    if shard.size == 1:
        return p
    rows = -(-len(p) // shard.size)  # the last ranks may have fewer, or none
    return nn.Parameter(p.detach()[shard.rank * rows :][:rows], requires_grad=False)


def _group_by_bytes(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Consecutive parameters of one dtype, in groups of up to BUCKET_BYTES; a larger parameter is its own group."""
    groups: list[list[nn.Parameter]] = []
    size = BUCKET_BYTES
    for p in parameters:
        if size + p.nbytes > BUCKET_BYTES or groups[-1][0].dtype != p.dtype:
            groups.append([])
            size = 0
        groups[-1].append(p)
        size += p.nbytes
    return groups
