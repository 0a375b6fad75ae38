"""Which part of a whole parameter a process holds: a box, from which its elements can be drawn, gathered and saved."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """The box of `size` at `offset` in a tensor of `shape`; one number a dimension each."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Piece":
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    def part(self, dim: int, parts: int, number: int) -> "Piece":
        """Part `number` of `parts` along `dim`: equal parts, of which the last ones are shorter, or empty."""
        start, stop = part_range(self.size[dim], parts, number)
        offset, size = list(self.offset), list(self.size)
        offset[dim], size[dim] = offset[dim] + start, stop - start
        return Piece(self.shape, tuple(offset), tuple(size))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What cuts it out of the whole."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.size, strict=True))

    def indices(self, start: int, stop: int, device: torch.device) -> Tensor:
        """For its elements start … stop, in row-major order, where each is in the whole: int64."""
        flat = torch.arange(start, stop, device=device)
        index, stride, inner = torch.zeros_like(flat), 1, 1
        for whole, offset, size in zip(reversed(self.shape), reversed(self.offset), reversed(self.size), strict=True):
            index += (flat // inner % size + offset) * stride
            stride, inner = stride * whole, inner * size
        return index


def part_range(length: int, parts: int, number: int) -> tuple[int, int]:
    """Start and stop of part `number`, as `torch.chunk` and FSDP2 divide.

    >>> [part_range(10, 4, i) for i in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    step = -(-length // parts)
    return min(length, number * step), min(length, (number + 1) * step)


def assemble(pieces: Mapping[Piece, Tensor]) -> Tensor:
    """The whole tensor that the pieces make up. AssertionError where they leave something open."""
    first, sample = next(iter(pieces.items()))
    whole, covered = sample.new_empty(first.shape), torch.zeros(first.shape, dtype=torch.bool)
    for piece, values in pieces.items():
        whole[piece.slices] = values
        covered[piece.slices] = True
    assert covered.all(), f"{int((~covered).sum())} elements of {first.shape} are in no piece"
    return whole
