"""Random numbers that depend on seed, purpose and document key alone, and exact sampling with them."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from gristmill.errors import UsageError

RandomNumbers = NDArray[np.uint64]
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's increment: 2^64 / golden ratio
_MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_64_BITS = (1 << 64) - 1
_BIN_BITS = 12  # leading bits that are counted: 4,096 bins


def check_seed(seed: int) -> None:
    """Raise UsageError for a seed that is negative or has more than 32 bits."""
    if not 0 <= seed < 1 << 32:
        raise UsageError(f"--seed {seed}: wanted a whole number from 0 to {(1 << 32) - 1}")


def random_numbers(seed: int, purpose: str, file: str, rows: NDArray[np.int64]) -> RandomNumbers:
    """One uniform 64-bit random number for each row of a file, independent between purposes.

    A SplitMix64 stream (Steele, Lea and Flood 2014) starts at the BLAKE2b hash of seed, purpose and file;
    row r gets its output r + 1, computed directly. The order of work therefore changes no number.

    >>> five, both = (random_numbers(1, "part", "book/a", np.array(rows)) for rows in ([5], [4, 5]))
    >>> other = random_numbers(2, "part", "book/a", np.array([5]))
    >>> bool(five[0] == both[1]), bool(five[0] == other[0])
    (True, False)
    """
    one, two = map(np.uint64, _MULTIPLIERS)
    state = np.uint64(_start(seed, purpose, file)) + (rows.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN_GAMMA)
    state = (state ^ (state >> np.uint64(30))) * one
    state = (state ^ (state >> np.uint64(27))) * two
    return state ^ (state >> np.uint64(31))


def random_number(seed: int, purpose: str, file: str, row: int) -> int:
    """The number that random_numbers has for one row: in integers of Python, several times faster than in an array.

    >>> random_number(1, "part", "book/a", 5) == random_numbers(1, "part", "book/a", np.array([5]))[0]
    np.True_
    """
    one, two = _MULTIPLIERS
    state = (_start(seed, purpose, file) + (row + 1) * _GOLDEN_GAMMA) & _64_BITS
    state = ((state ^ (state >> 30)) * one) & _64_BITS
    state = ((state ^ (state >> 27)) * two) & _64_BITS
    return state ^ (state >> 31)


def _start(seed: int, purpose: str, file: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{purpose}\0{file}".encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class SourceEpochs:
    """Epochs of one source: every document is written `whole` times, a random fraction of them once more.

    `extra_limit` is the largest random number that gets the extra copy; None where no document does.
    """

    whole: int
    extra_limit: int | None = None

    def copies(self, numbers: RandomNumbers) -> NDArray[np.int64]:
        """Copies to write of each document, given one random number for each."""
        copies = np.full(len(numbers), self.whole, np.int64)
        if self.extra_limit is not None:
            copies += numbers <= np.uint64(self.extra_limit)
        return copies


def kth_smallest(chunks: Callable[[], Iterable[RandomNumbers]], k: int) -> int | None:
    """The k-th smallest number of all chunks (None for k = 0): exactly k numbers are at most this large.

    Radix selection in two passes: a histogram of the leading bits, then a sort of one of its bins. `chunks` is called
    once for each pass, so that memory holds one chunk and one bin at a time. `k` is at most the number of numbers.

    >>> kth_smallest(lambda: [np.array([9, 1], np.uint64), np.array([4], np.uint64)], 2)
    4
    """
    if k <= 0:
        return None
    number, below = find_bin(reduce(np.add, map(histogram_of, chunks())), k)
    candidates = [in_bin(chunk, number) for chunk in chunks()]
    return int(np.sort(np.concatenate(candidates))[k - below - 1])


def histogram_of(numbers: RandomNumbers) -> NDArray[np.int64]:
    """How many of the numbers (n) are in each bin (4,096) of their leading bits."""
    return np.bincount(_bins(numbers), minlength=1 << _BIN_BITS)


def find_bin(histogram: NDArray[np.int64], k: int) -> tuple[int, int]:
    """The bin of the k-th smallest number (k ≥ 1), and how many numbers are in lower bins."""
    ends = np.cumsum(histogram)
    number = int(np.searchsorted(ends, k))
    return number, int(ends[number] - histogram[number])


def in_bin(numbers: RandomNumbers, number: int) -> RandomNumbers:
    """Those of the numbers that are in a bin."""
    return numbers[_bins(numbers) == number]


def _bins(numbers: RandomNumbers) -> NDArray[np.int64]:
    return (numbers >> np.uint64(64 - _BIN_BITS)).astype(np.int64)
