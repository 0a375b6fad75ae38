"""ShardSpec: a shard's offset and size in the global tensor."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ShardSpec:
    """A rectangular shard: `size` elements from `offset` in a global tensor of `global_shape`, per dimension."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "ShardSpec":
        """Return a single shard: the full tensor of `shape`."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    def shard(self, dim: int, parts: int, index: int) -> "ShardSpec":
        """Split into `parts` along `dim` and return shard `index`; the last shards may be shorter, or empty."""
        start, stop = shard_range(self.size[dim], parts, index)
        offset = list(self.offset)
        size = list(self.size)
        offset[dim], size[dim] = offset[dim] + start, stop - start
        return ShardSpec(self.global_shape, tuple(offset), tuple(size))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the index of the shard in the global tensor: one slice per dimension."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.size, strict=True))

    def indices(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return global flat indices of the shard's elements start … stop, both row-major; (stop - start,) int64."""
        flat = torch.arange(start, stop, device=device)
        index = torch.zeros_like(flat)
        stride = 1
        inner = 1
        innermost_first = (reversed(self.global_shape), reversed(self.offset), reversed(self.size))
        for length, offset, size in zip(*innermost_first, strict=True):
            index += (flat // inner % size + offset) * stride
            stride = stride * length
            inner = inner * size
        return index


def shard_range(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of shard `index` when `length` is split into `parts`, as `torch.chunk` and FSDP2 do.

    >>> [shard_range(10, 4, i) for i in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    step = -(-length // parts)
    return min(length, index * step), min(length, (index + 1) * step)


def assemble_shards(shards: Mapping[ShardSpec, Tensor]) -> Tensor:
    """Assemble the global tensor from its shards. Raises AssertionError if they do not cover it."""
    first, sample = next(iter(shards.items()))
    whole = sample.new_empty(first.global_shape)
    covered = torch.zeros(first.global_shape, dtype=torch.bool)
    for spec, values in shards.items():
        whole[spec.slices] = values
        covered[spec.slices] = True
    assert covered.all(), f"{int((~covered).sum())} elements of {first.global_shape} are in no shard"
    return whole
