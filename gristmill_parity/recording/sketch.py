"""Sketch: a few numbers that stand for a tensor, linear in it, so that those of pieces and of terms add up.

A sketch is WIDTH random projections, +1 or -1 for each element by its place in the global tensor: the sketch of a
tensor is the sum of the sketches of its pieces, whoever has them, and the norm of the difference of two sketches is
about that of the tensors' difference.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

WIDTH = 16
_CHUNK = 1 << 20  # elements hashed at a time: bounds the memory of a hash
_MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15, odd
_SEED = 20_261_129
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sketch_of(values: Tensor, indices: Sequence[np.ndarray[Any, Any]], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the sketch, (WIDTH,) float64, of a piece at these indices of a tensor of `shape`."""
    if values.numel() == 0:
        return np.zeros(WIDTH)
    matrix = values.detach().reshape(-1, values.shape[-1]) if values.ndim else values.detach().reshape(1, 1)
    rows = np.zeros(1, np.int64)
    for dim in range(len(shape) - 1):
        rows = (rows[:, None] * shape[dim] + indices[dim][None, :]).reshape(-1)
    columns = indices[-1] if len(shape) else np.zeros(1, np.int64)
    dtype = torch.float64 if matrix.dtype == torch.float64 else torch.float32
    row_count = int(np.prod(shape[:-1], dtype=np.int64)) if len(shape) else 1
    of_rows = _signs(row_count, 0)[torch.from_numpy(rows)].to(matrix.device, dtype)
    of_columns = _signs(shape[-1] if len(shape) else 1, 1)[torch.from_numpy(columns)].to(matrix.device, dtype)
    projected = matrix.to(dtype) @ of_columns
    found: np.ndarray[Any, Any] = (projected.double() * of_rows).sum(0).cpu().numpy()
    return found


@functools.lru_cache(maxsize=64)
def _signs(count: int, side: int) -> Tensor:
    """Return +1 or -1 for each of `count` places, (count, WIDTH) int8; the same on all machines."""
    drawn = np.random.Generator(np.random.PCG64([_SEED, side])).integers(0, 256, (count, WIDTH // 8), dtype=np.uint8)
    bits = np.unpackbits(drawn, axis=1)
    return torch.from_numpy(bits.astype(np.int8) * 2 - 1)


def hash_of(values: Tensor) -> int:
    """Return a hash of the bits of a tensor, computed where it is; equal for equal bits of one dtype and order."""
    bits = values.detach().contiguous().flatten()
    bits = (bits.to(torch.int8) if bits.dtype == torch.bool else bits).view(_INTEGERS[bits.element_size()])
    total = 0
    for start in range(0, len(bits), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        places = torch.arange(start, start + len(part), device=part.device)
        mixed = (part + places * 2 + 1) * _MULTIPLIER
        total = (total + int((mixed ^ (mixed >> 29)).sum())) % (1 << 64)
    return total
