"""Choices by hash: every draw is a function of seed, purpose and key, so that no order of work changes it."""

import hashlib
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

Draws = NDArray[np.uint64]
NEVER = np.uint64(0xFFFFFFFFFFFFFFFF)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BUCKETS = 16  # bits of a draw that the first pass of `smallest` counts


def draws(seed: int, purpose: str, file: str, rows: NDArray[np.int64]) -> Draws:
    """A uniform 64-bit number for each row of a file, independent for each purpose (SplitMix64, Steele et al. 2014).

    >>> one, same = draws(1, "part", "book/a", np.array([5])), draws(1, "part", "book/a", np.array([4, 5]))
    >>> bool(one[0] == same[1]), bool(draws(2, "part", "book/a", np.array([5]))[0] == one[0])
    (True, False)
    """
    digest = hashlib.blake2b(f"{seed}\0{purpose}\0{file}".encode(), digest_size=8).digest()
    state = np.uint64(int.from_bytes(digest, "little")) + (rows.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def smallest(pieces: Callable[[], Iterable[Draws]], count: int) -> np.uint64 | None:
    """The largest of the `count` smallest draws (None for none): `draw <= smallest(…)` chooses exactly `count`.

    `pieces` is called twice, and holds one 65,536th of the draws at a time beside the piece in hand.

    >>> smallest(lambda: [np.array([9, 1], np.uint64), np.array([4], np.uint64)], 2)
    np.uint64(4)
    """
    if count <= 0:
        return None
    shift = np.uint64(64 - _BUCKETS)
    sizes = np.zeros(1 << _BUCKETS, np.int64)
    for piece in pieces():
        sizes += np.bincount((piece >> shift).astype(np.int64), minlength=len(sizes))
    ends = np.cumsum(sizes)
    bucket = int(np.searchsorted(ends, count))
    inside = [piece[(piece >> shift) == bucket] for piece in pieces()]
    rank = count - int(ends[bucket] - sizes[bucket])
    return np.sort(np.concatenate(inside))[rank - 1]
