"""XXH64 with seed 0, compiled: of one message, and of many side by side (message_words.py).

Specification: github.com/Cyan4973/xxHash, doc/xxhash_spec.md. All arithmetic is modulo 2^64.
"""

import numpy as np

from dedup.minhash.message_words import WORDS, load_word
from gristmill.kernels import kernel

_U = np.uint64
_P1, _P2, _P3 = map(_U, (11400714785074694791, 14029467366897019727, 1609587929392839161))
_P4, _P5 = map(_U, (9650029242287828579, 2870177450012600261))
STRIPE = 32  # bytes; only messages of at least one stripe use the four accumulators


@kernel(inline="always")
def _rotate_left(value: np.uint64, bits: int) -> np.uint64:
    return _U((value << _U(bits)) | (value >> _U(64 - bits)))


@kernel(inline="always")
def _load_eight(data: np.ndarray, at: np.uintp) -> np.uint64:
    """Return the eight bytes from data[at] on, little-endian."""
    return _U(load_word(data, at)) | _U(_U(load_word(data, at + np.uintp(4))) << _U(32))


@kernel(inline="always")
def _round(accumulator: np.uint64, word: np.uint64) -> np.uint64:
    return _U(_rotate_left(_U(accumulator + word * _P2), 31) * _P1)


@kernel(inline="always")
def _mix_eight(value: np.uint64, word: np.uint64) -> np.uint64:
    return _U(_rotate_left(_U(value ^ _round(_U(0), word)), 27) * _P1 + _P4)


@kernel(inline="always")
def _mix_four(value: np.uint64, word: np.uint64) -> np.uint64:
    return _U(_rotate_left(_U(value ^ _U(word * _P1)), 23) * _P2 + _P3)


@kernel(inline="always")
def _mix_byte(value: np.uint64, byte: np.uint64) -> np.uint64:
    return _U(_rotate_left(_U(value ^ _U(byte * _P5)), 11) * _P1)


@kernel(inline="always")
def _avalanche(value: np.uint64) -> np.uint64:
    value = _U(_U(value ^ (value >> _U(33))) * _P2)
    value = _U(_U(value ^ (value >> _U(29))) * _P3)
    return _U(value ^ (value >> _U(32)))


@kernel
def xxh64_fixed(words: np.ndarray, length: int, hashes: np.ndarray) -> None:
    """Write to `hashes` (uint64) the XXH64 of messages that are all `length` bytes long, less than STRIPE."""
    n = len(hashes)
    whole = length // 4
    for i in range(n):
        hashes[i] = _U(_P5 + _U(length))
    for k in range(0, whole - 1, 2):
        low = words[k]
        high = words[k + 1]
        for i in range(n):
            hashes[i] = _mix_eight(hashes[i], _U(_U(low[i]) | (_U(high[i]) << _U(32))))
    if whole % 2:
        low = words[whole - 1]
        for i in range(n):
            hashes[i] = _mix_four(hashes[i], _U(low[i]))
    tails = words[WORDS - 1]
    for k in range(length % 4):
        for i in range(n):
            hashes[i] = _mix_byte(hashes[i], _U((tails[i] >> np.uint32(8 * k)) & np.uint32(0xFF)))
    for i in range(n):
        hashes[i] = _avalanche(hashes[i])


@kernel
def xxh64(data: np.ndarray, start: int, end: int) -> np.uint64:
    """Return the XXH64 of data[start:end] (uint8)."""
    at = np.uintp(start)
    last = np.uintp(end)
    length = end - start
    value = _P5
    if length >= 32:
        v1 = _U(_P1 + _P2)
        v2 = _P2
        v3 = _U(0)
        v4 = _U(_U(0) - _P1)
        while at + np.uintp(32) <= last:
            v1 = _round(v1, _load_eight(data, at))
            v2 = _round(v2, _load_eight(data, at + np.uintp(8)))
            v3 = _round(v3, _load_eight(data, at + np.uintp(16)))
            v4 = _round(v4, _load_eight(data, at + np.uintp(24)))
            at += np.uintp(32)
        value = _U(_U(_rotate_left(v1, 1) + _rotate_left(v2, 7)) + _U(_rotate_left(v3, 12) + _rotate_left(v4, 18)))
        for accumulator in (v1, v2, v3, v4):
            value = _U(_U(value ^ _round(_U(0), accumulator)) * _P1 + _P4)
    value = _U(value + _U(length))
    while at + np.uintp(8) <= last:
        value = _mix_eight(value, _load_eight(data, at))
        at += np.uintp(8)
    if at + np.uintp(4) <= last:
        value = _mix_four(value, _U(load_word(data, at)))
        at += np.uintp(4)
    while at < last:
        value = _mix_byte(value, _U(data[at]))
        at += np.uintp(1)
    return _avalanche(value)
