"""Shingle sets of the documents kept in a cluster, and the first of them that a later document is similar to."""

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel

Shingles = NDArray[np.uint64]  # hashes, ascending, each once
PARITY_WORDS = 128  # of 64 bits: enough for documents of some ten thousand shingles
_SHIFT = np.uint64(64 - 13)  # 2^13 bits
_BLOCK = 16  # words compared before a look at how many bits differ
_OVERHEAD = 256 + 8 * PARITY_WORDS  # bytes that a kept set takes besides its shingles


class KeptSets:
    """Shingle sets, one after another in a flat array that grows up to `memory` bytes; the first always fits.

    Each has a row of parity bits, too: one for all shingles that begin with the same 13 bits, 1 if their number is odd.
    Two sets differ in at least as many shingles as their rows do in bits, so most that are not alike need not be
    compared. (The bitmap filter of Sandes, Teodoro and Melo, 2020, for exact set similarity joins.)
    """

    def __init__(self, is_containment: bool, threshold: float, memory: int) -> None:
        self.is_containment, self.threshold = is_containment, threshold
        self.capacity = memory // 8
        self.flat = np.empty(0, np.uint64)
        self.starts = np.zeros(16, np.int64)
        self.parities = np.zeros((16, PARITY_WORDS), np.uint64)
        self.count = 0
        self.is_full = False

    def clear(self) -> None:
        self.count, self.is_full = 0, False

    def first_match(self, shingles: Shingles) -> tuple[int, float]:
        """The number of the first set that is similar enough, and the similarity; (-1, 0.0) if none is."""
        kept = self.flat, self.starts, self.parities, self.count
        return _first_match(shingles, parity_of(shingles), *kept, self.is_containment, self.threshold)

    def add(self, shingles: Shingles) -> bool:
        """Add a set. False if there is no room; then there is none until `clear`, even for a smaller one."""
        start = int(self.starts[self.count])
        end = start + len(shingles)
        self.is_full |= self.count > 0 and end + (self.count + 1) * (_OVERHEAD // 8) > self.capacity
        if self.is_full:
            return False
        if end > len(self.flat):
            room = max(end, min(2 * end, self.capacity))
            self.flat = np.concatenate([self.flat[:start], np.empty(room - start, np.uint64)])
        if self.count + 2 > len(self.starts):
            self.starts = np.concatenate([self.starts, np.zeros_like(self.starts)])
        if self.count == len(self.parities):
            more = np.empty((max(16, self.count // 4), PARITY_WORDS), np.uint64)  # twice as many might not fit
            self.parities = np.concatenate([self.parities, more])
        self.flat[start:end], self.parities[self.count] = shingles, parity_of(shingles)
        self.count += 1
        self.starts[self.count] = end
        return True


@kernel
def parity_of(shingles: np.ndarray) -> np.ndarray:
    """The parity bits of a set, PARITY_WORDS words (uint64)."""
    parity = np.zeros(PARITY_WORDS, np.uint64)
    for shingle in shingles:
        bit = shingle >> _SHIFT
        parity[np.uintp(bit >> np.uint64(6))] ^= np.uint64(1) << (bit & np.uint64(63))
    return parity


@kernel
def _first_match(
    one: np.ndarray, parity: np.ndarray, flat: np.ndarray, starts: np.ndarray, parities: np.ndarray, count: int,
    is_containment: bool, threshold: float,
) -> tuple[int, float]:  # fmt: skip
    """The number and similarity of the first of `count` sets, flat[starts[i] : starts[i + 1]], similar to `one`."""
    for number in range(count):
        other = flat[starts[number] : starts[number + 1]]
        needed = fewest_shared(len(one), len(other), is_containment, threshold)
        if needed <= min(len(one), len(other)):  # otherwise their sizes differ too much
            most = len(one) + len(other) - 2 * needed  # shingles in one of them alone
            if _differ_more(parity, parities[number], most):
                continue
            shared = count_shared(one, other, needed)
            if shared >= needed:
                return number, shared / (len(one) if is_containment else len(one) + len(other) - shared)
    return -1, 0.0


@kernel
def fewest_shared(one: int, other: int, is_containment: bool, threshold: float) -> int:
    """The least number of shared shingles with which two sets of these sizes reach the threshold, in float64.

    It exceeds the smaller size if they cannot reach it.
    """
    least = threshold * one if is_containment else threshold * (one + other) / (1 + threshold)
    needed = max(1, int(least) - 1)  # rounding errors of `least` are below 1; the loop finds the exact number
    most = min(one, other)
    while needed <= most and needed / (one if is_containment else one + other - needed) < threshold:
        needed += 1
    return needed


@kernel
def count_shared(one: np.ndarray, other: np.ndarray, needed: int) -> int:
    """The number of values that two ascending arrays share, or -1 as soon as `needed` are out of reach."""
    i, j, shared = np.uintp(0), np.uintp(0), np.uintp(0)
    spare_one, spare_other = np.uintp(len(one) - needed), np.uintp(len(other) - needed)
    while i < len(one) and j < len(other):
        a, b = one[i], other[j]
        shared += np.uintp(a == b)  # additions in place of branches, which would be mispredicted
        i += np.uintp(a <= b)
        j += np.uintp(b <= a)
        if i - shared > spare_one or j - shared > spare_other:
            return -1
    return int(shared)


@kernel
def _differ_more(one: np.ndarray, other: np.ndarray, most: int) -> bool:
    """Whether parity bits differ in more than `most` places, and so the sets in more than so many shingles."""
    found = np.uint64(0)
    for start in range(0, PARITY_WORDS, _BLOCK):
        for i in range(start, start + _BLOCK):
            bits = one[i] ^ other[i]  # how many are 1, by adding neighbours (Warren, Hacker's Delight, 5-1)
            bits -= (bits >> np.uint64(1)) & np.uint64(0x5555555555555555)
            bits = (bits & np.uint64(0x3333333333333333)) + ((bits >> np.uint64(2)) & np.uint64(0x3333333333333333))
            bits = (bits + (bits >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
            found += (bits * np.uint64(0x0101010101010101)) >> np.uint64(56)
        if found > np.uint64(most):
            return True
    return False
