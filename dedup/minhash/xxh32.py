"""XXH32 with seed 0, compiled: of one message, and of many side by side (message_words.py).

Specification: github.com/Cyan4973/xxHash, doc/xxhash_spec.md.
"""

import numpy as np

from dedup.minhash.message_words import WORDS, load_word, rotate_left
from gristmill.kernels import kernel

_U = np.uint32
_P1, _P2, _P3, _P4, _P5 = map(_U, (2654435761, 2246822519, 3266489917, 668265263, 374761393))
STRIPE = 16  # bytes; only messages of at least one stripe use the four accumulators


@kernel(inline="always")
def _avalanche(value: np.uint32) -> np.uint32:
    """XXH32's final mixing (spec, step 6)."""
    value = _U(value ^ (value >> _U(15)))
    value = _U(value * _P2)
    value = _U(value ^ (value >> _U(13)))
    value = _U(value * _P3)
    return _U(value ^ (value >> _U(16)))


@kernel(inline="always")
def _round(accumulator: np.uint32, word: np.uint32) -> np.uint32:
    """Mix one word of a stripe into its accumulator (spec, step 2)."""
    return _U(rotate_left(_U(accumulator + _U(word * _P2)), 13) * _P1)


@kernel(inline="always")
def _mix_word(value: np.uint32, word: np.uint32) -> np.uint32:
    return _U(rotate_left(_U(value + _U(word * _P3)), 17) * _P4)


@kernel(inline="always")
def _mix_byte(value: np.uint32, byte: np.uint32) -> np.uint32:
    return _U(rotate_left(_U(value + _U(byte * _P5)), 11) * _P1)


@kernel(inline="always")
def _merge(v1: np.uint32, v2: np.uint32, v3: np.uint32, v4: np.uint32) -> np.uint32:
    """Combine the four accumulators (spec, step 3)."""
    return _U(_U(rotate_left(v1, 1) + rotate_left(v2, 7)) + _U(rotate_left(v3, 12) + rotate_left(v4, 18)))


@kernel
def xxh32(data: np.ndarray, start: int, end: int) -> np.uint32:
    """Return the XXH32 of data[start:end] (uint8)."""
    at = np.uintp(start)
    last = np.uintp(end)
    value = _P5
    if end - start >= 16:
        v1 = _U(_P1 + _P2)
        v2 = _P2
        v3 = _U(0)
        v4 = _U(_U(0) - _P1)
        while at + np.uintp(16) <= last:
            v1 = _round(v1, load_word(data, at))
            v2 = _round(v2, load_word(data, at + np.uintp(4)))
            v3 = _round(v3, load_word(data, at + np.uintp(8)))
            v4 = _round(v4, load_word(data, at + np.uintp(12)))
            at += np.uintp(16)
        value = _merge(v1, v2, v3, v4)
    value = _U(value + _U(end - start))
    while at + np.uintp(4) <= last:
        value = _mix_word(value, load_word(data, at))
        at += np.uintp(4)
    while at < last:
        value = _mix_byte(value, _U(data[at]))
        at += np.uintp(1)
    return _avalanche(value)


@kernel
def xxh32_fixed(words: np.ndarray, length: int, hashes: np.ndarray) -> None:
    """Write to `hashes` (uint32) the XXH32 of messages that are all `length` bytes long, less than STRIPE."""
    n = len(hashes)
    for i in range(n):
        hashes[i] = _U(_P5 + _U(length))
    for k in range(length // 4):
        word_k = words[k]
        for i in range(n):
            hashes[i] = _mix_word(hashes[i], word_k[i])
    tails = words[WORDS - 1]
    for k in range(length % 4):
        for i in range(n):
            hashes[i] = _mix_byte(hashes[i], _U((tails[i] >> _U(8 * k)) & _U(0xFF)))
    for i in range(n):
        hashes[i] = _avalanche(hashes[i])


@kernel
def xxh32_varying(
    words: np.ndarray, lengths: np.ndarray, max_length: int, hashes: np.ndarray, accumulators: np.ndarray
) -> None:
    """Write to `hashes` (uint32) the XXH32 of messages of lengths[i] ≤ max_length bytes.

    `accumulators` is scratch: uint32, 4 rows or more × messages.
    """
    _mix_stripes(words, lengths, max_length, hashes, accumulators)
    for k in range(max_length // 4):
        word_k = words[k]
        for i in range(len(hashes)):
            inside = (_U(4 * k + 4) <= lengths[i]) & (_U(4 * k) >= (lengths[i] & _U(0xFFFFFFF0)))
            hashes[i] = _mix_word(hashes[i], word_k[i]) if inside else hashes[i]
    tails = words[WORDS - 1]
    for k in range(3):
        for i in range(len(hashes)):
            mixed = _mix_byte(hashes[i], _U((tails[i] >> _U(8 * k)) & _U(0xFF)))
            hashes[i] = mixed if (lengths[i] & _U(3)) > _U(k) else hashes[i]
    for i in range(len(hashes)):
        hashes[i] = _avalanche(hashes[i])


@kernel
def _mix_stripes(
    words: np.ndarray, lengths: np.ndarray, max_length: int, hashes: np.ndarray, accumulators: np.ndarray
) -> None:
    """Write the state after all whole stripes and the length (spec, steps 1 to 4)."""
    n = len(hashes)
    v1 = accumulators[0]
    v2 = accumulators[1]
    v3 = accumulators[2]
    v4 = accumulators[3]
    for i in range(n):
        v1[i] = _U(_P1 + _P2)
        v2[i] = _P2
        v3[i] = _U(0)
        v4[i] = _U(_U(0) - _P1)
    for k in range(max_length // 16 * 4):
        accumulator = accumulators[k % 4]
        word_k = words[k]
        end = _U((k // 4 + 1) * 16)
        for i in range(n):
            accumulator[i] = _round(accumulator[i], word_k[i]) if lengths[i] >= end else accumulator[i]
    for i in range(n):
        hashes[i] = _U((_merge(v1[i], v2[i], v3[i], v4[i]) if lengths[i] >= _U(16) else _P5) + lengths[i])
