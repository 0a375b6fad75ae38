"""Kernels: how much of a text is n-grams of words that it has several times, in linear time by hashing."""

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel
from preprocessing.quality.words import Words

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def top_ngram(words: Words, n: int) -> int:
    """Characters, spaces included, of all occurrences of the n-gram that a text has most often; 0 without any."""
    return int(_top_ngram(words.hash, words.length, n))


def repeated_ngrams(words: Words, n: int) -> int:
    """Characters, without spaces, of the n-grams that a text had before; they do not overlap."""
    return int(_repeated_ngrams(words.hash, words.length, n))


@kernel(inline="always")
def _mix(hashes: NDArray[np.uint64], at: int, n: int) -> np.uint64:
    value = np.uint64(n)
    for place in range(at, at + n):
        value = (value ^ hashes[place]) * _MULTIPLIER
        value ^= value >> _SHIFT
    return value


@kernel(inline="always")
def _slots(entries: int) -> int:
    """Slots of a hash table at most half full, a power of two."""
    size = 4
    while size < 2 * entries:
        size *= 2
    return size


@kernel
def _top_ngram(hashes: NDArray[np.uint64], lengths: NDArray[np.int64], n: int) -> int:
    total = len(hashes) - n + 1
    if total <= 0:
        return 0
    size = _slots(total)
    mask = np.uint64(size - 1)
    keys, counts, firsts = np.zeros(size, np.uint64), np.zeros(size, np.int64), np.zeros(size, np.int64)
    most, first = 0, 0
    for at in range(total):
        key = _mix(hashes, at, n)
        slot = key & mask
        while counts[slot] and keys[slot] != key:
            slot = (slot + np.uint64(1)) & mask
        if counts[slot] == 0:
            keys[slot], firsts[slot] = key, at
        counts[slot] += 1
        if counts[slot] > most or (counts[slot] == most and firsts[slot] < first):
            most, first = counts[slot], firsts[slot]
    characters = n - 1
    for place in range(first, first + n):
        characters += lengths[place]
    return characters * most


@kernel
def _repeated_ngrams(hashes: NDArray[np.uint64], lengths: NDArray[np.int64], n: int) -> int:
    total = len(hashes) - n + 1
    if total <= 0:
        return 0
    size = _slots(total)
    mask = np.uint64(size - 1)
    keys, used = np.zeros(size, np.uint64), np.zeros(size, np.uint8)
    characters, at = 0, 0
    while at < total:
        key = _mix(hashes, at, n)
        slot = key & mask
        while used[slot] and keys[slot] != key:
            slot = (slot + np.uint64(1)) & mask
        if used[slot]:
            for place in range(at, at + n):
                characters += lengths[place]
            at += n
        else:
            keys[slot], used[slot] = key, 1
            at += 1
    return characters
