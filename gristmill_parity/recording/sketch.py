"""Sketch: a few numbers that stand for a tensor, linear in it, so that those of pieces and of terms add up.

A sketch is WIDTH random projections, +1 or -1 for each element by its place in the global tensor: the sketch of a
tensor is the sum of the sketches of its pieces, whoever has them, and the norm of the difference of two sketches is
about that of the tensors' difference.

An element's sign is the product of its row's and its column's. The columns of a large tensor are in blocks of 64 or 16;
the sign of a column is that of its block, for each projection another one, times that of its place in the block, which
all projections share. So each block is summed to one number first: one multiplication per element rather than WIDTH.
"""

import ctypes
import functools
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gristmill_parity.recording.placement import Runs, expand_runs

WIDTH = 16
_BLOCKS = (64, 16)
"""Columns of a block: the first number that divides the global tensor's."""
_SMALLEST_IN_BLOCKS = 1 << 13
"""Elements of the global tensor: the blocks of a smaller one would be few, and their sums might be near zero."""
_SEED = 20_261_129
_CHUNK = 1 << 15
"""Words of 8 bytes that are hashed with one set of keys: they and their products stay in a core's cache."""
_CHUNKS_ON_GPU = 128
"""Chunks that a GPU hashes at once."""
_MIXED_BY = 31
"""Places by which the highest bits of a word are mixed into lower ones; 32 would cancel signs of both its numbers."""
_BASE = 0x9E3779B97F4A7C15
"""Base of the polynomial of chunks' hashes that a tensor's hash is; odd."""
_WORD = 1 << 64

Array = np.ndarray[Any, Any]


def sketch_of(values: Tensor, index: Sequence[Runs], shape: Sequence[int]) -> Array:
    """Return the sketch, (WIDTH,) float64, of a piece at these indices of a tensor of `shape`."""
    if values.numel() == 0:
        return np.zeros(WIDTH)
    exact = values if values.dtype in (torch.float32, torch.float64) else values.float()
    matrix = exact.reshape(-1, values.shape[-1]) if values.ndim else exact.reshape(1, 1)
    device = matrix.device
    of_rows = _signs_of_rows(tuple(index[:-1]), tuple(shape[:-1]), device)
    columns = index[-1] if index else ((0, 1, 1),)
    block = _block_of(tuple(shape))
    if block > 1 and _are_whole_blocks(columns, block):
        sums = matrix.reshape(-1, block).mv(_signs_in_block(block, exact.dtype, device)).view(len(matrix), -1)
        sketch = (of_rows.T @ sums.double()).mul_(_signs_of_blocks(columns, block, device)).sum(1)
    else:
        signs = _signs_of_columns(columns, block, exact.dtype, device)
        sketch = (matrix @ signs).double().mul_(of_rows).sum(0)
    array: Array = sketch.numpy(force=True)
    return array


@functools.lru_cache(maxsize=1024)
def _block_of(shape: tuple[int, ...]) -> int:
    """Return the number of columns in a block of a tensor; 1 of a small one, and of one whose columns none divides."""
    if math.prod(shape) < _SMALLEST_IN_BLOCKS:
        return 1
    return next((block for block in _BLOCKS if shape[-1] % block == 0), 1)


def _are_whole_blocks(columns: Runs, block: int) -> bool:
    """True of one run of columns that begins and ends with a block."""
    if len(columns) != 1:
        return False
    start, stop, step = columns[0]
    return step == 1 and start % block == 0 and stop % block == 0


@functools.lru_cache(maxsize=32)
def _signs_of_rows(index: tuple[Runs, ...], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the signs of a piece's rows, (rows, WIDTH) float64."""
    rows = np.zeros(1, np.int64)
    for size, runs in zip(shape, index, strict=True):
        rows = (rows[:, None] * size + expand_runs(runs)[None, :]).reshape(-1)
    count = math.prod(shape)
    return _signs(count, 0)[torch.from_numpy(rows)].to(device, torch.float64)


@functools.lru_cache(maxsize=32)
def _signs_of_columns(columns: Runs, block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the signs of a piece's columns, (columns, WIDTH)."""
    numbers = expand_runs(columns)
    of_blocks = _signs(int(numbers.max()) // block + 1, 1)[torch.from_numpy(numbers // block)]
    if block == 1:
        return of_blocks.to(device, dtype)
    in_block = _signs(block, 3)[torch.from_numpy(numbers % block), :1]
    return (of_blocks * in_block).to(device, dtype)


@functools.lru_cache(maxsize=32)
def _signs_of_blocks(columns: Runs, block: int, device: torch.device) -> Tensor:
    """Return the signs of the blocks of columns, (WIDTH, blocks) float64."""
    start, stop, _ = columns[0]
    return _signs(stop // block, 1)[start // block :].T.to(device, torch.float64)


@functools.lru_cache(maxsize=8)
def _signs_in_block(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the signs of the columns of any block, (block,)."""
    return _signs(block, 3)[:, 0].to(device, dtype)


@functools.lru_cache(maxsize=64)
def _signs(count: int, side: int) -> Tensor:
    """Return +1 or -1 for each of `count` places, (count, WIDTH) int8; the same on all machines, for any count."""
    drawn = np.random.Generator(np.random.PCG64([_SEED, side])).integers(0, 256, (count, WIDTH // 8), dtype=np.uint8)
    bits = np.unpackbits(drawn, axis=1)
    return torch.from_numpy(bits.astype(np.int8) * 2 - 1)


def octets_of(values: Tensor) -> Array:
    """Return the bytes of a contiguous tensor on the CPU where they are, to be read while the tensor is held.

    By their address: torch resizes no storage that numpy has seen, as FSDP does with gathered parameters.
    """
    if values.nbytes == 0:
        return np.empty(0, np.uint8)
    memory = (ctypes.c_char * values.nbytes).from_address(values.data_ptr())
    return np.frombuffer(memoryview(memory), np.uint8)


def hash_of(values: Tensor) -> int:
    """Return a hash of the bits of a tensor, computed where it is; equal for equal bits of one dtype and order.

    The hash of a chunk is the sum of its words of 64 bits, each times a random key, modulo 2**64. The highest bits of a
    word are the highest of its product, too, where two of them cancel, as the signs of two numbers. So they are mixed
    into lower ones before: word ^ (word >> 31). Two chunks then have one hash with a chance of 2**-32 or less, but for
    words of which only certain pairs of bits differ, 31 places apart.
    """
    whole = values.contiguous()
    hashes = _hashes_on_cpu(whole) if whole.device.type == "cpu" else _hashes_on_gpu(whole)
    total = whole.nbytes
    for hashed in hashes:
        total = (total * _BASE + hashed) % _WORD
    return total


class _Scratch(threading.local):
    """Memory of a thread for the mixed words of a chunk: to ask for it each time costs as much as to fill it."""

    def __init__(self) -> None:
        self.words = np.empty(_CHUNK, np.int64)


_SCRATCH = _Scratch()


def _hashes_on_cpu(whole: Tensor) -> list[int]:
    """Return the hash of each chunk of a contiguous tensor."""
    octets = octets_of(whole)
    count = len(octets) // 8
    words = octets[: 8 * count].view(np.int64)
    chunks = [words[start : start + _CHUNK] for start in range(0, count, _CHUNK)]
    rest = octets[8 * count :]
    if len(rest):
        last = np.frombuffer(rest.tobytes().ljust(8, b"\0"), np.int64)
        if count % _CHUNK:
            chunks[-1] = np.concatenate([chunks[-1], last])
        else:
            chunks.append(last)
    keys = _keys()
    hashes = list[int]()
    for chunk in chunks:
        mixed = _SCRATCH.words[: len(chunk)]
        np.right_shift(chunk, _MIXED_BY, out=mixed)
        np.bitwise_xor(chunk, mixed, out=mixed)
        # of integers it is faster than numpy's and torch's dot
        hashes.append(int(np.einsum("i,i->", mixed, keys[: len(chunk)])))
    return hashes


def _hashes_on_gpu(whole: Tensor) -> list[int]:
    """Return the hash of each chunk of a contiguous tensor on a GPU."""
    octets = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    left = len(octets) % 8
    words = octets[: len(octets) - left].view(torch.int64)
    if left:
        words = torch.cat([words, torch.cat([octets[-left:], octets.new_zeros(8 - left)]).view(torch.int64)])
    hashes = list[int]()
    for chunks in words.split(_CHUNK * _CHUNKS_ON_GPU):
        hashes += _hashes_of_chunks(chunks)
    return hashes


def _hashes_of_chunks(words: Tensor) -> list[int]:
    """Return the hash of each chunk of a tensor on a GPU, which has no dot product of integers, and waits for each."""
    keys = _keys_on_device(words.device)
    mixed = words ^ (words >> _MIXED_BY)
    whole = mixed[: len(words) // _CHUNK * _CHUNK].view(-1, _CHUNK)
    hashes: list[int] = (whole * keys).sum(1).tolist()
    rest = mixed[whole.numel() :]
    if len(rest):
        hashes.append(int((rest * keys[: len(rest)]).sum()))
    return hashes


@functools.lru_cache(maxsize=1)
def _keys() -> Array:
    """Return a random key of 64 bits for each word of a chunk; the same on all machines."""
    drawn = np.random.Generator(np.random.PCG64([_SEED, 2])).integers(0, 1 << 64, _CHUNK, dtype=np.uint64)
    return drawn.view(np.int64)


@functools.lru_cache(maxsize=8)
def _keys_on_device(device: torch.device) -> Tensor:
    return torch.from_numpy(_keys()).to(device)
