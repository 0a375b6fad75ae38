"""Counter-based random numbers keyed by name: SplitMix64 (Steele et al. 2014, figure 11).

Each element depends on its key and its index only, not on RNG state: a rank draws the elements of its shard,
and every layout draws the same tensor.
"""

import hashlib

import torch
from torch import Tensor


def key_from_name(name: str) -> int:
    """Return the 64-bit key: a hash of the name, as a signed int64."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def keyed_normal(seed: int, name: str, index: Tensor) -> Tensor:
    """Standard normal numbers, float64, shape of `index` (int64); element i depends on seed, name and index[i]."""
    uniform = (_shift_right(splitmix64(index + 1, key_from_name(f"{seed}/{name}")), 11).double() + 0.5) * 2.0**-53
    return torch.special.ndtri(uniform)


def keyed_bernoulli(p: float, key: Tensor, index: Tensor) -> Tensor:
    """Bernoulli draws: True with probability `p`; `key` and `index` are int64 and broadcast."""
    counter = -(~index)  # index + 1; torch.compile would fold the plain sum into constants beyond int64
    return _shift_right(splitmix64(counter, key), 11) < int(p * 2**53)


def splitmix64(counter: Tensor, key: Tensor | int) -> Tensor:
    """Output number `counter` of SplitMix64 seeded with `key`; int64, which wraps like uint64."""
    z = counter * _as_int64(0x9E3779B97F4A7C15) + key
    z = (z ^ _shift_right(z, 30)) * _as_int64(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _as_int64(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _as_int64(value: int) -> int:
    """Reinterpret a uint64 constant as int64."""
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Return the logical right shift: `>>` on int64 copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
