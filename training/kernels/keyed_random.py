"""Random numbers as a function of a name and an index, not of who draws them, when, or what was drawn before.

A counter-based generator, SplitMix64 (Steele et al. 2014, figure 11): so a process that holds a part of
a tensor draws that part's elements, and all layouts draw the same.
"""

import hashlib

import torch
from torch import Tensor


def key_of(name: str) -> int:
    """The generator's state for a name, int64."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def keyed_normal(seed: int, name: str, index: Tensor) -> Tensor:
    """Standard normal numbers (float64), element by element a function of seed, name and index (int64)."""
    uniform = (_shift_right(splitmix64(index + 1, key_of(f"{seed}/{name}")), 11).double() + 0.5) * 2.0**-53
    return torch.special.ndtri(uniform)


def keyed_below(p: float, key: Tensor, index: Tensor) -> Tensor:
    """True with probability `p`, for each index under its key; both int64, of shapes that broadcast."""
    counter = -(~index)  # + 1, but not so that torch.compile multiplies it out, to factors beyond int64
    return _shift_right(splitmix64(counter, key), 11) < int(p * 2**53)


def splitmix64(counter: Tensor, key: Tensor | int) -> Tensor:
    """The counter-th output of SplitMix64 from state `key`; int64 arithmetic wraps as uint64 would."""
    z = counter * _signed(0x9E3779B97F4A7C15) + key
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
