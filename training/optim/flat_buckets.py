"""Flat parameter buffer, in buckets: the unit in which AdamW updates parameters and moves their state.

Parameters start at multiples of ALIGNMENT in the buffer and are split at multiples of it, so that the vectorised
AdamW kernel rounds each element as it does without buckets. Updating a GPU's parameters on the CPU follows
ZeRO-Offload (Ren et al. 2021).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from training.sharding.sharded_parameter import ShardedParameter

ALIGNMENT = 64  # elements; a multiple of the kernel's vector width and of its unit of work per thread
BUCKET_NUMEL = 1 << 22  # elements per bucket by default: 96 MiB of float32 moments in memory
BUCKETS_IN_FLIGHT = 3  # buckets in memory at a time: one is read, one updated, one written


@dataclass(frozen=True)
class BucketSlice:
    """The elements of one parameter that lie in one bucket."""

    param: int
    """Index of the parameter."""
    start: int
    """First element, in the flattened parameter."""
    numel: int
    offset: int
    """Position of the first element in the bucket."""


@dataclass(frozen=True)
class Bucket:
    """Elements `start` … `start + numel` of the flat buffer, padding included, and the parameters' slices in it."""

    start: int
    numel: int
    slices: tuple[BucketSlice, ...]

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return the views of this bucket's slices; `flat` is a 1-d tensor that begins with the bucket's elements."""
        starts = [s.offset for s in self.slices] + [self.numel]
        parts = flat[: self.numel].split([stop - start for start, stop in pairwise(starts)])  # one call for all
        pairs = zip(parts, self.slices, strict=True)
        return [part if len(part) == s.numel else part[: s.numel] for part, s in pairs]


def plan_buckets(sizes: Sequence[int], max_numel: int | None) -> tuple[int, list[Bucket]]:
    """Lay out parameters of `sizes` elements in the flat buffer; return its length and its buckets.

    A bucket has `max_numel` elements at most (rounded to ALIGNMENT); None: one bucket.

    >>> plan_buckets([70, 64], 128)[1][0].slices
    (BucketSlice(param=0, start=0, numel=70, offset=0),)
    """
    width = max_numel and max(ALIGNMENT, max_numel // ALIGNMENT * ALIGNMENT)
    buckets: list[Bucket] = []
    start = offset = 0
    slices: list[BucketSlice] = []
    for param, size in enumerate(sizes):
        done = 0
        while done < size:
            numel = min(size - done, width - offset) if width else size
            slices.append(BucketSlice(param, done, numel, offset))
            done = done + numel
            offset = offset + -(-numel // ALIGNMENT) * ALIGNMENT
            if offset == width:
                buckets.append(Bucket(start, offset, tuple(slices)))
                start = start + offset
                offset = 0
                slices = []
    if slices:
        buckets.append(Bucket(start, offset, tuple(slices)))
    return start + offset, buckets


class InPlace:
    """Parameters or moments that are updated where they are: nothing is read before and written after."""

    def prefetch(self, index: int) -> None:
        pass

    def write_back(self, index: int) -> None:
        pass

    def finish(self) -> None:
        pass


class ParamsInPlace(InPlace):
    """Parameters and gradients, updated on the device that holds them."""

    def __init__(self, params: Sequence[ShardedParameter], buckets: list[Bucket]) -> None:
        self.params = params
        self.buckets = buckets
        self.values = [[_values(params, s) for s in bucket.slices] for bucket in buckets]

    def get(self, index: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the values and gradients of a bucket's slices, flat."""
        return self.values[index], [_gradients(self.params, s) for s in self.buckets[index].slices]


class ParamsStagedOnCPU:
    """A GPU's parameters and gradients, copied to pinned memory and back while other buckets are updated."""

    def __init__(self, params: Sequence[ShardedParameter], buckets: list[Bucket], dtype: torch.dtype) -> None:
        self.params = params
        self.buckets = buckets
        longest = max((bucket.numel for bucket in buckets), default=0)
        self.slots = [torch.empty(2, longest, dtype=dtype, pin_memory=True) for _ in range(BUCKETS_IN_FLIGHT)]
        # Each direction of copies has a stream of its own, so that they overlap.
        self.to_cpu = torch.cuda.Stream()
        self.to_gpu = torch.cuda.Stream()
        self.on_cpu = [torch.cuda.Event() for _ in range(BUCKETS_IN_FLIGHT)]
        self.on_gpu = [torch.cuda.Event() for _ in range(BUCKETS_IN_FLIGHT)]

    def prefetch(self, index: int) -> None:
        """Start to copy a bucket to the CPU."""
        if index == 0:
            self.to_cpu.wait_stream(torch.cuda.current_stream())  # the backward pass has computed the gradients
        self.on_gpu[index % BUCKETS_IN_FLIGHT].synchronize()
        with torch.cuda.stream(self.to_cpu):
            for s, value, gradient in self._slot(index):
                value.copy_(_values(self.params, s), non_blocking=True)
                gradient.copy_(_gradients(self.params, s), non_blocking=True)
            self.on_cpu[index % BUCKETS_IN_FLIGHT].record()

    def get(self, index: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the values and gradients of a bucket's slices, flat; waits for their copy."""
        self.on_cpu[index % BUCKETS_IN_FLIGHT].synchronize()
        slot = self._slot(index)
        return [value for _, value, _ in slot], [gradient for *_, gradient in slot]

    def write_back(self, index: int) -> None:
        """Start to copy a bucket's values to the GPU."""
        with torch.cuda.stream(self.to_gpu):
            for s, value, _ in self._slot(index):
                _values(self.params, s).copy_(value, non_blocking=True)
            self.on_gpu[index % BUCKETS_IN_FLIGHT].record()

    def finish(self) -> None:
        """Make the current stream wait for all copies to the GPU."""
        torch.cuda.current_stream().wait_stream(self.to_gpu)

    def _slot(self, index: int) -> list[tuple[BucketSlice, Tensor, Tensor]]:
        values, gradients = self.slots[index % BUCKETS_IN_FLIGHT]
        slices = self.buckets[index].slices
        return [(s, values[s.offset : s.offset + s.numel], gradients[s.offset : s.offset + s.numel]) for s in slices]


def _values(params: Sequence[ShardedParameter], s: BucketSlice) -> Tensor:
    return _slice(params[s.param].local.detach().view(-1), s)


def _gradients(params: Sequence[ShardedParameter], s: BucketSlice) -> Tensor:
    gradient = params[s.param].local.grad
    assert gradient is not None
    return _slice(gradient.reshape(-1), s)


def _slice(flat: Tensor, s: BucketSlice) -> Tensor:
    return flat if len(flat) == s.numel else flat[s.start : s.start + s.numel]
