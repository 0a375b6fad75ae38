"""Data parallelism: gradients are reduced over the replicas in buckets, during the backward pass (Li et al. 2020).

Ranks along "shard" each update 1 / n of every parameter's rows (ZeRO, Rajbhandari et al. 2020): stage 1 shards the
optimizer state, stage 2 the gradients too; stage 3 is FSDP (fsdp.py). With G bytes of gradients and P bytes of
parameters in the compute dtype, a step
- without ZeRO all-reduces G over "replicate";
- with ZeRO-1 reduce-scatters G over "shard", and all-gathers P: the updated parameters, each bucket while earlier
  ones are used;
- with ZeRO-2 does the same, but reduce-scatters after each micro-batch, so that no full gradient is kept;
- with several groups (hybrid sharding) also all-reduces each rank's G / n over "replicate".

In mixed precision a module has a 16-bit copy of each parameter, and this rank float32 master weights of the rows that
it updates; the 16-bit gradients of a micro-batch are summed in the buckets, in float32.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from training.distributed.collectives import all_gather, reduce_scatter, wait
from training.kernels.precision import accumulation_dtype
from training.sharding.axis import Axis

BUCKET_BYTES = 25 << 20  # large enough to use a link's bandwidth, small enough to overlap with the backward pass
BUCKETS_IN_FLIGHT = 2  # with ZeRO: before a third one is reduced or gathered, the first is waited for, and freed


class GradBucket:
    """Parameters whose gradients one collective reduces; `own[i]`: the shard of `full[i]` that this rank updates.

    The buffer of gradient sums is (n, L), n ranks along "shard": row r has rank r's rows of every parameter, each
    padded to the same length on all ranks, so one reduce-scatter gives each rank the rows that it updates. Gradients
    are moved into it as they are computed, and those of `own` are views of what the collective leaves: none exists
    twice.
    """

    def __init__(
        self,
        full: list[nn.Parameter],
        own: list[nn.Parameter],
        shard: Axis,
        replicate: Axis,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.full = full
        self.own = own
        self.shard = shard
        self.replicate = replicate
        self.reduce_dtype = reduce_dtype or own[0].dtype
        self.rows = [-(-len(p) // shard.size) for p in full]
        self.lengths = [rows * (p.numel() // len(p)) for p, rows in zip(full, self.rows, strict=True)]  # of a rank
        self.pending = len(full)  # parameters whose gradient the current backward pass has not computed yet
        self._index = {id(p): i for i, p in enumerate(full)}
        self._sums: list[Tensor] | None = None  # views of the buffer, one per parameter: (n, rows, …)
        self._buffer: Tensor | None = None
        self._filled: set[int] = set()
        self._reduced: Tensor | None = None
        self._sent: Tensor | None = None  # held until it is waited for, as NCCL does
        self._work: dist.Work | None = None
        self._gathering: tuple[dist.Work, Tensor, Tensor] | None = None  # with what is received and sent

    def add(self, p: Tensor) -> None:
        """Move the gradient of `p` into the buffer, which sums those of several micro-batches."""
        assert p.grad is not None
        i = self._index[id(p)]
        sums = self._sums or self._allocate()
        grad = p.grad
        missing = self.shard.size * self.rows[i] - len(p)
        if missing:
            grad = F.pad(grad, (0, 0) * (grad.ndim - 1) + (0, missing))
        grad = grad.unflatten(0, (self.shard.size, -1))
        if i in self._filled:
            sums[i].add_(grad)
        else:
            sums[i].copy_(grad)
        self._filled.add(i)
        p.grad = None

    def start_reduce(self) -> None:
        """Start to reduce the sums, asynchronously."""
        assert self._reduced is None
        for i, sums in enumerate(self._sums or self._allocate()):
            if i not in self._filled:
                sums.zero_()
        assert self._buffer is not None
        buffer = self._buffer.to(self.reduce_dtype)
        self.reset()
        self._start_sum(buffer)

    def _start_sum(self, buffer: Tensor) -> None:
        """Start to sum the buffer, (n, L), over the replicas."""
        if self.shard.size > 1:
            self._sent = buffer
            self._reduced = torch.empty_like(buffer[0])
            self._work = reduce_scatter(self._reduced, buffer.flatten(), group=self.shard.group, async_op=True)
        else:
            self._reduced = buffer[0]
            if self.replicate.size > 1:
                self._work = dist.all_reduce(self._reduced, group=self.replicate.group, async_op=True)

    def finish_reduce(self) -> None:
        """Wait for the reduced gradients and accumulate them on the shards that this rank updates."""
        if self._reduced is None:
            return
        reduced = self._finish_sum(self._reduced).to(self.own[0].dtype)
        for own, values in zip(self.own, reduced.split(self.lengths), strict=True):
            grad = values[: own.numel()].view_as(own)
            own.grad = grad if own.grad is None else own.grad.add_(grad)
        self._reduced = self._sent = self._work = None

    def _finish_sum(self, reduced: Tensor) -> Tensor:
        """Wait for the sum, (L,), of this rank's rows; `reduced` is where it is received."""
        if self._work is not None:
            wait(self._work, self.replicate.group if self.shard.size == 1 else self.shard.group)
        if self.shard.size > 1 and self.replicate.size > 1:
            dist.all_reduce(reduced, group=self.replicate.group)
        return reduced

    def reset(self) -> None:
        """Drop the sums."""
        self._sums = self._buffer = None
        self._filled = set()

    def start_all_gather(self) -> None:
        """Start to all-gather the updated rows, cast; without shards, copy them to the full parameters."""
        if self.shard.size > 1:
            padded = []
            for own, length in zip(self.own, self.lengths, strict=True):
                padded.append(F.pad(own.detach().flatten(), (0, length - own.numel())).to(self.full[0].dtype))
            mine = torch.cat(padded)
            gathered = mine.new_empty(self.shard.size, len(mine))
            work = all_gather(gathered.flatten(), mine, group=self.shard.group, async_op=True)
            self._gathering = work, gathered, mine
        elif self.full[0] is not self.own[0]:
            torch._foreach_copy_([p.detach() for p in self.full], [p.detach() for p in self.own])

    def finish_all_gather(self) -> None:
        """Wait for the rows that are gathered, and copy them to the full parameters."""
        if self._gathering is None:
            return
        work, gathered, _ = self._gathering
        wait(work, self.shard.group)
        for p, values in zip(self.full, gathered.split(self.lengths, dim=1), strict=True):
            p.detach().copy_(values.flatten()[: p.numel()].view_as(p))
        self._gathering = None

    def _allocate(self) -> list[Tensor]:
        size = (self.shard.size, sum(self.lengths))
        own = self.own[0]
        self._buffer = torch.empty(size, dtype=own.dtype, device=own.device)
        self._sums = []
        for rows, p in zip(self._buffer.split(self.lengths, dim=1), self.full, strict=True):
            self._sums.append(rows.unflatten(1, (-1, *p.shape[1:])))
        return self._sums


class GradReducer:
    """Reduces the gradients of one pipeline stage, or of the unsplit decoder, over the replicas; ZeRO-0 to 2.

    `own`: the shard that this rank updates, by the id of the full parameter: the rows themselves, or float32 master
    weights of 16-bit ones. Without replicas and in one dtype gradients stay where autograd puts them. `make_bucket`
    takes the arguments of `GradBucket`: a class of buckets that are sent otherwise. `others`: the axes of parameters
    that have other replicas, by id: of experts.
    """

    def __init__(
        self,
        full: Sequence[nn.Parameter],
        shard: Axis,
        replicate: Axis,
        zero: int,
        micro_batches: int = 1,
        reduce_dtype: torch.dtype | None = None,
        make_bucket: Callable[..., GradBucket] = GradBucket,
        others: Mapping[int, tuple[Axis, Axis]] = MappingProxyType({}),
    ) -> None:
        axes = {id(p): others.get(id(p), (shard, replicate)) for p in full}
        self.own = {id(p): _own_rows(p, axes[id(p)][0], is_apart=shard.size > 1) for p in full}
        in_place = shard.size == replicate.size == 1 and all(self.own[id(p)] is p for p in full)
        backward = list(reversed(full))  # the order in which gradients are computed
        self.buckets: list[GradBucket] = []
        self._bucket_of: dict[int, GradBucket] = {}
        for group in [] if in_place else _group_by_bytes(backward, lambda p: axes[id(p)][0].name):
            own = [self.own[id(p)] for p in group]
            bucket = make_bucket(group, own, *axes[id(group[0])], reduce_dtype)
            self.buckets.append(bucket)
            self._bucket_of |= {id(p): bucket for p in group}
        self.shard = shard
        self._passes_per_reduction = 1 if zero == 2 and shard.size > 1 else micro_batches
        self._passes = 0
        self._started = 0  # buckets of the current pass whose reduction was started
        self._in_pass = False
        self._by_use = self.buckets[::-1]  # the order of the forward pass
        self._gathered = len(self.buckets)  # of those: the others are being gathered, or wait for it
        for bucket in self.buckets:
            for p in bucket.full:
                p.register_post_accumulate_grad_hook(self._on_grad)

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Context of one micro-batch's backward pass.

        Each gradient is moved to its bucket; in the last micro-batch, with ZeRO-2 in each, a bucket is reduced as soon
        as it is complete. The reductions of the pass before are waited for first.
        """
        self.finish()
        self._passes = self._passes + 1
        self._in_pass = True
        for bucket in self.buckets:
            bucket.pending = len(bucket.full)
        yield
        self._in_pass = False
        for bucket in self.buckets:
            for p in bucket.full:
                if p.grad is not None:  # a split backward pass calls no hooks
                    bucket.add(p)
        while self._reduces and self._started < len(self.buckets):
            self._start_next()
        self._started = 0

    def finish(self) -> None:
        """Wait for the reductions that were started."""
        for bucket in self.buckets:
            bucket.finish_reduce()

    def start_all_gather(self) -> None:
        """After an update: start to copy the updated rows to the full parameters, cast, and between ranks."""
        self.finish_all_gather()
        self._gathered = 0
        for bucket in self._by_use[:BUCKETS_IN_FLIGHT]:
            bucket.start_all_gather()
        if self.shard.size == 1:
            self.finish_all_gather()

    def finish_all_gather(self, count: int | None = None) -> None:
        """Wait until the first `count` buckets in the order of use are complete, by default all; start those after."""
        if count is None:
            count = len(self._by_use)
        while self._gathered < count:
            self._by_use[self._gathered].finish_all_gather()
            self._gathered += 1
            for bucket in self._by_use[self._gathered + BUCKETS_IN_FLIGHT - 1 :][:1]:
                bucket.start_all_gather()

    def all_gather_before_use(self, modules: Iterable[nn.Module]) -> None:
        """Make every one of `modules` wait, before its forward pass, for the buckets of its parameters only."""
        if not self.buckets or self.shard.size == 1:
            return
        turns = {id(bucket): turn for turn, bucket in enumerate(self._by_use, 1)}
        for module in modules:
            count = max((turns[id(self._bucket_of[id(p)])] for p in module.parameters()), default=0)
            module.register_forward_pre_hook(lambda *_, count=count: self.finish_all_gather(count))

    @property
    def _reduces(self) -> bool:
        """Return whether the current backward pass is to reduce gradients."""
        return self._passes % self._passes_per_reduction == 0

    def _on_grad(self, p: Tensor) -> None:
        if not self._in_pass:
            return
        bucket = self._bucket_of[id(p)]
        bucket.add(p)
        bucket.pending -= 1
        # in a fixed order and not as buckets fill: collectives must match on all ranks
        while self._reduces and self._started < len(self.buckets) and self.buckets[self._started].pending == 0:
            self._start_next()

    def _start_next(self) -> None:
        """Start to reduce the next bucket; without shards, results stay in the memory of the sums, until the update."""
        self.buckets[self._started].start_reduce()
        if self.shard.size > 1 and self._started >= BUCKETS_IN_FLIGHT:
            self.buckets[self._started - BUCKETS_IN_FLIGHT].finish_reduce()
        self._started += 1


def _own_rows(p: nn.Parameter, shard: Axis, is_apart: bool) -> nn.Parameter:
    """Return the rows that this rank updates: a view of them, `p` itself where nothing is sharded, or master weights.

    `is_apart`: never `p` itself, as its gradient may be moved while sums of an earlier micro-batch are kept.
    """
    dtype = accumulation_dtype(p.dtype)
    if shard.size == 1 and p.dtype == dtype and not is_apart:
        return p
    rows = -(-len(p) // shard.size)  # the last ranks may have fewer, or none
    mine = p.detach()[shard.rank * rows :][:rows]
    if p.dtype != dtype:
        mine = torch.empty_like(mine, dtype=dtype)
    return nn.Parameter(mine, requires_grad=False)


def _group_by_bytes(parameters: list[nn.Parameter], axes_of: Callable[[nn.Parameter], str]) -> list[list[nn.Parameter]]:
    """Group parameters of one dtype and the same axes, up to BUCKET_BYTES of gradient sums; a larger one is alone.

    In the order in which groups are complete.
    """
    groups: list[list[nn.Parameter]] = []
    open_groups: dict[tuple[torch.dtype, str], tuple[list[nn.Parameter], int]] = {}
    for p in parameters:
        kind = (p.dtype, axes_of(p))
        nbytes = p.numel() * accumulation_dtype(p.dtype).itemsize
        group, size = open_groups.get(kind, ([], BUCKET_BYTES))
        if size + nbytes > BUCKET_BYTES:
            group = []
            size = 0
            groups.append(group)
        group.append(p)
        open_groups[kind] = group, size + nbytes
    turn = {id(p): i for i, p in enumerate(parameters)}
    return sorted(groups, key=lambda group: turn[id(group[-1])])
