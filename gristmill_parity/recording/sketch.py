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

from gristmill_parity.recording.placement import Runs, expand_runs

WIDTH = 16
_SEED = 20_261_129
_CHUNK = 1 << 15
"""Words of 8 bytes that are hashed with one set of keys: they and their products stay in a core's cache."""
_CHUNKS_ON_GPU = 128
"""Chunks that a GPU hashes at once."""
_BASE = 0x9E3779B97F4A7C15
"""Base of the polynomial of chunks' hashes that a tensor's hash is; odd."""
_WORD = 1 << 64
_SMALLEST_SQUARE = 1e-30
_LARGEST_SQUARE = 1e30


def sketch_of(values: Tensor, index: Sequence[Runs], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the sketch, (WIDTH,) float64, of a piece at these indices of a tensor of `shape`."""
    if values.numel() == 0:
        return np.zeros(WIDTH)
    matrix = values.detach().reshape(-1, values.shape[-1]) if values.ndim else values.detach().reshape(1, 1)
    dtype = torch.float64 if matrix.dtype == torch.float64 else torch.float32
    of_rows = _signs_of_rows(tuple(index[:-1]), tuple(shape[:-1]), dtype, matrix.device)
    of_columns = _signs_of_columns(tuple(index[-1:]), tuple(shape[-1:]), dtype, matrix.device)
    projected = matrix.to(dtype) @ of_columns
    sketch: np.ndarray[Any, Any] = projected.mul_(of_rows).sum(0, dtype=torch.float64).numpy(force=True)
    return sketch


@functools.lru_cache(maxsize=32)
def _signs_of_rows(index: tuple[Runs, ...], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the signs of a piece's rows, (rows, WIDTH)."""
    rows = np.zeros(1, np.int64)
    for size, runs in zip(shape, index, strict=True):
        rows = (rows[:, None] * size + expand_runs(runs)[None, :]).reshape(-1)
    count = int(np.prod(shape, dtype=np.int64))
    return _signs(count, 0)[torch.from_numpy(rows)].to(device, dtype)


@functools.lru_cache(maxsize=32)
def _signs_of_columns(
    index: tuple[Runs, ...], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the signs of a piece's columns, (columns, WIDTH)."""
    columns = expand_runs(index[0]) if index else np.zeros(1, np.int64)
    return _signs(shape[0] if shape else 1, 1)[torch.from_numpy(columns)].to(device, dtype)


@functools.lru_cache(maxsize=64)
def _signs(count: int, side: int) -> Tensor:
    """Return +1 or -1 for each of `count` places, (count, WIDTH) int8; the same on all machines."""
    drawn = np.random.Generator(np.random.PCG64([_SEED, side])).integers(0, 256, (count, WIDTH // 8), dtype=np.uint8)
    bits = np.unpackbits(drawn, axis=1)
    return torch.from_numpy(bits.astype(np.int8) * 2 - 1)


def norm_of(values: Tensor) -> float:
    """Return the 2-norm of a tensor of float32 or float64."""
    norm = float(torch.linalg.vector_norm(values))
    if values.dtype != torch.float64 and not _SMALLEST_SQUARE < norm**2 < _LARGEST_SQUARE:
        norm = float(torch.linalg.vector_norm(values.double()))  # squares of few numbers have left float32's range
    return norm


def hash_of(values: Tensor) -> int:
    """Return a hash of the bits of a tensor, computed where it is; equal for equal bits of one dtype and order.

    The hash of a chunk is multilinear, the sum of each 32-bit number times a random key of 64 bits, modulo 2**64: two
    chunks that differ have one hash with a chance of 2**-33 or less. A product of 64-bit words has the keys of both
    halves: key * word + second * (word >> 32).
    """
    whole = values.detach().contiguous()
    # a tensor of one element may be contiguous with a stride of 0, of which torch makes no view as bytes
    octets = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    left = len(octets) % 8
    words = octets[: len(octets) - left].view(torch.int64)
    if left:
        words = torch.cat([words, torch.cat([octets[-left:], octets.new_zeros(8 - left)]).view(torch.int64)])
    total = len(octets)
    if words.device.type == "cpu":
        keys, second = _keys(words.device)
        for start in range(0, len(words), _CHUNK):
            chunk = words[start : start + _CHUNK]
            size = len(chunk)
            hashed = int(torch.dot(chunk, keys[:size])) + int(torch.dot(chunk >> 32, second[:size]))
            total = (total * _BASE + hashed) % _WORD
    else:
        for chunks in words.split(_CHUNK * _CHUNKS_ON_GPU):
            for hashed in _hashes_of_chunks(chunks):
                total = (total * _BASE + hashed) % _WORD
    return total


def _hashes_of_chunks(words: Tensor) -> list[int]:
    """Return the hash of each chunk of a tensor on a GPU, which has no dot product of integers, and waits for each."""
    keys, second = _keys(words.device)
    whole = words[: len(words) // _CHUNK * _CHUNK].view(-1, _CHUNK)
    hashes: list[int] = ((whole * keys).sum(1) + ((whole >> 32) * second).sum(1)).tolist()
    rest = words[whole.numel() :]
    if len(rest):
        hashes.append(int((rest * keys[: len(rest)]).sum() + ((rest >> 32) * second[: len(rest)]).sum()))
    return hashes


@functools.lru_cache(maxsize=8)
def _keys(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two random keys of 64 bits for each word of a chunk; the same on all machines."""
    drawn = np.random.Generator(np.random.PCG64([_SEED, 2])).integers(0, 1 << 64, (2, _CHUNK), dtype=np.uint64)
    keys = torch.from_numpy(drawn.view(np.int64)).to(device)
    return keys[0], keys[1]
