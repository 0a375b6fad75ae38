"""What a process updates, as one row cut into buckets; and a bucket's parameters and gradients, wherever they are.

Every parameter begins at a multiple of ALIGNED elements and is cut at multiples of it, so that AdamW's
vectorised kernel rounds each element as it does where nothing is cut. Updating a GPU's parameters on the
CPU is ZeRO-Offload's idea (Ren et al. 2021).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from training.sharding.sharded_parameter import ShardedParameter

ALIGNED = 64  # elements: what the kernel gives a thread is a multiple of it, and so is what it vectorises
BUCKET = 1 << 22  # elements of a bucket, unless told otherwise: 96 MiB of float32 states are in memory then
SLOTS = 3  # buckets in memory: being read, updated, written


@dataclass(frozen=True)
class Cut:
    """Elements of one param that are in a bucket: `length` of them, from `start` of the param and `at` of it."""

    param: int
    start: int
    length: int
    at: int


@dataclass(frozen=True)
class Bucket:
    """Elements `start` … `start + length` of the row."""

    start: int
    length: int
    cuts: tuple[Cut, ...]

    def divide(self, row: Tensor) -> list[Tensor]:
        """The cuts of this bucket's part of a row, as views; in one operation, as there are many."""
        starts = [cut.at for cut in self.cuts] + [self.length]
        parts = row[: self.length].split([stop - start for start, stop in pairwise(starts)])
        pairs = zip(parts, self.cuts, strict=True)
        return [part if len(part) == cut.length else part[: cut.length] for part, cut in pairs]


def plan(sizes: Sequence[int], most: int | None) -> tuple[int, list[Bucket]]:
    """The row's length, and buckets of `most` elements or fewer (None: one) for params of so many elements.

    >>> plan([70, 64], 128)[1][0].cuts
    (Cut(param=0, start=0, length=70, at=0),)
    """
    width = most and max(ALIGNED, most // ALIGNED * ALIGNED)
    buckets: list[Bucket] = []
    start = at = 0
    cuts: list[Cut] = []
    for param, size in enumerate(sizes):
        done = 0
        while done < size:
            length = min(size - done, width - at) if width else size
            cuts.append(Cut(param, done, length, at))
            done, at = done + length, at + -(-length // ALIGNED) * ALIGNED
            if at == width:
                buckets.append(Bucket(start, at, tuple(cuts)))
                start, at, cuts = start + at, 0, []
    if cuts:
        buckets.append(Bucket(start, at, tuple(cuts)))
    return start + at, buckets


class InPlace:
    """Parameters and gradients that are updated where they are."""

    def __init__(self, params: Sequence[ShardedParameter], buckets: list[Bucket]) -> None:
        self.params, self.buckets = params, buckets
        self.values = [[_values(params, cut) for cut in bucket.cuts] for bucket in buckets]

    def begin(self, number: int) -> None:
        pass

    def take(self, number: int) -> tuple[list[Tensor], list[Tensor]]:
        """The values of a bucket's cuts, and their gradients: flat."""
        return self.values[number], [_gradients(self.params, cut) for cut in self.buckets[number].cuts]

    def put(self, number: int) -> None:
        pass

    def finish(self) -> None:
        pass


class Staged:
    """Parameters and gradients of a GPU, copied to the CPU and back while other buckets are computed."""

    def __init__(self, params: Sequence[ShardedParameter], buckets: list[Bucket], dtype: torch.dtype) -> None:
        self.params, self.buckets = params, buckets
        longest = max((bucket.length for bucket in buckets), default=0)
        self.slots = [torch.empty(2, longest, dtype=dtype, pin_memory=True) for _ in range(SLOTS)]
        self.down, self.up = torch.cuda.Stream(), torch.cuda.Stream()
        self.arrived, self.left = ([torch.cuda.Event() for _ in range(SLOTS)] for _ in range(2))

    def begin(self, number: int) -> None:
        if number == 0:
            self.down.wait_stream(torch.cuda.current_stream())  # the gradients are there
        self.left[number % SLOTS].synchronize()
        with torch.cuda.stream(self.down):
            for cut, value, gradient in self._places(number):
                value.copy_(_values(self.params, cut), non_blocking=True)
                gradient.copy_(_gradients(self.params, cut), non_blocking=True)
            self.arrived[number % SLOTS].record()

    def take(self, number: int) -> tuple[list[Tensor], list[Tensor]]:
        self.arrived[number % SLOTS].synchronize()
        places = self._places(number)
        return [value for _, value, _ in places], [gradient for *_, gradient in places]

    def put(self, number: int) -> None:
        with torch.cuda.stream(self.up):
            for cut, value, _ in self._places(number):
                _values(self.params, cut).copy_(value, non_blocking=True)
            self.left[number % SLOTS].record()

    def finish(self) -> None:
        torch.cuda.current_stream().wait_stream(self.up)

    def _places(self, number: int) -> list[tuple[Cut, Tensor, Tensor]]:
        values, gradients = self.slots[number % SLOTS]
        cuts = self.buckets[number].cuts
        return [(c, values[c.at : c.at + c.length], gradients[c.at : c.at + c.length]) for c in cuts]


def _values(params: Sequence[ShardedParameter], cut: Cut) -> Tensor:
    return _cut(params[cut.param].local.detach().view(-1), cut)


def _gradients(params: Sequence[ShardedParameter], cut: Cut) -> Tensor:
    gradient = params[cut.param].local.grad
    assert gradient is not None
    return _cut(gradient.reshape(-1), cut)


def _cut(flat: Tensor, cut: Cut) -> Tensor:
    return flat if len(flat) == cut.length else flat[cut.start : cut.start + cut.length]
