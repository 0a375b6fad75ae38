"""The shingles of texts as sets of 64-bit hashes, for exact Jaccard similarities."""

from collections.abc import Sequence
from typing import get_args

import numba as nb
import numpy as np
from numpy.typing import NDArray

from dedup.minhash.matching_form import Unit, find_units, form_size, pack, write_form
from dedup.minhash.xxh32 import LONGEST, ROWS, gather_even, word
from gristmill.errors import UsageError

_BLOCK = 512  # shingles hashed side by side
_STRIPE = 32  # bytes from which on XXH64 is another
_U = np.uint64
_P1, _P2, _P3 = map(_U, (11400714785074694791, 14029467366897019727, 1609587929392839161))
_P4, _P5 = map(_U, (9650029242287828579, 2870177450012600261))


def shingle_sets(texts: Sequence[str], width: int = 13, unit: Unit = "character") -> list[NDArray[np.uint64]]:
    """For each text, the XXH64 of every shingle of its matching form: sorted, unique, uint64.

    A text shorter than a shingle has an empty set. Two shingles that differ share a hash with a chance
    of 2^-64: sets of a million shingles each, in one comparison of 15 million.

    >>> one, other = shingle_sets(["The quick brown fox", "the quick brown cat!"], width=4)
    >>> len(one), len(other), len(np.intersect1d(one, other))
    (16, 16, 13)
    """
    if width < 1 or unit not in get_args(Unit):
        raise UsageError(f"shingles of {width} {unit}: wanted 1 or more of {' or '.join(get_args(Unit))}")
    sets: list[NDArray[np.uint64]] = []
    for _, data, offsets in pack(texts):
        hashes, counts = np.empty(len(data), np.uint64), np.empty(len(offsets) - 1, np.int64)
        form = np.empty(form_size(int(np.max(np.diff(offsets)))), np.uint8)
        _hash_all(data, offsets, width, unit == "word", form, hashes, counts)
        ends = np.cumsum(counts)
        sets.extend(hashes[end - count : end].copy() for end, count in zip(ends, counts, strict=True))
    return sets


@nb.njit(nogil=True, cache=True)
def _hash_all(
    data: np.ndarray, offsets: np.ndarray, width: int, by_word: bool, form: np.ndarray, hashes: np.ndarray,
    counts: np.ndarray,
) -> None:  # fmt: skip
    """The sets of packed texts, one text's after the other's, `counts` hashes in each; `form` is scratch."""
    starts, found = np.empty(len(form), np.int32), np.empty(len(form), np.uint64)
    rows, words = np.empty((ROWS, _BLOCK), np.uint32), np.empty(_BLOCK + LONGEST, np.uint32)
    at = 0
    for i in range(len(counts)):
        size, is_ascii = write_form(data[offsets[i] : offsets[i + 1]], form)
        if is_ascii and not by_word and width < _STRIPE:
            count = max(size - width + 1, 0)
            for first in range(0, count, _BLOCK):
                values = found[first : min(first + _BLOCK, count)]
                gather_even(form[first:], width, len(values), rows, words)
                xxh64_even(rows, width, values)
        else:
            count = max(find_units(form, size, by_word, starts) - width + 1, 0)
            for k in range(count):
                found[k] = xxh64(form, starts[k], starts[k + width] - by_word)
        counts[i] = _sorted_set(found[:count], hashes[at:])
        at += counts[i]


@nb.njit(nogil=True, cache=True)
def _sorted_set(found: np.ndarray, out: np.ndarray) -> int:
    """Write what is in `found` to `out`, ascending and each once; return how many there are.

    Hashes are evenly spread: thrown into as many buckets, by their highest bits, they are all but sorted.
    """
    bits = 1
    while (1 << bits) < len(found):
        bits += 1
    shift, one = _U(64 - bits), np.uintp(1)
    ends = np.zeros((1 << bits) + 1, np.int32)
    for value in found:
        ends[np.uintp(value >> shift) + one] += 1
    for i in range(1, len(ends)):
        ends[i] += ends[i - 1]
    for value in found:
        bucket = np.uintp(value >> shift)
        out[ends[bucket]] = value
        ends[bucket] += 1
    return _insert(out[: len(found)])


@nb.njit(nogil=True, cache=True)
def _insert(out: np.ndarray) -> int:
    """Sort what is all but sorted, in place, each value once; return how many there are."""
    kept = 0
    for i in range(len(out)):
        value, k = out[i], kept
        while k > 0 and out[k - 1] > value:
            k -= 1
        if k > 0 and out[k - 1] == value:
            continue
        for move in range(kept, k, -1):
            out[move] = out[move - 1]
        out[k] = value
        kept += 1
    return kept


@nb.njit(inline="always")
def _rotate(value: np.uint64, bits: int) -> np.uint64:
    return _U((value << _U(bits)) | (value >> _U(64 - bits)))


@nb.njit(inline="always")
def _word(data: np.ndarray, at: np.uintp) -> np.uint64:
    """Eight bytes, little-endian."""
    return _U(word(data, at)) | _U(_U(word(data, at + np.uintp(4))) << _U(32))


@nb.njit(inline="always")
def _round(lane: np.uint64, word: np.uint64) -> np.uint64:
    return _U(_rotate(_U(lane + word * _P2), 31) * _P1)


@nb.njit(inline="always")
def _mix_eight(value: np.uint64, word: np.uint64) -> np.uint64:
    return _U(_rotate(_U(value ^ _round(_U(0), word)), 27) * _P1 + _P4)


@nb.njit(inline="always")
def _mix_four(value: np.uint64, word: np.uint64) -> np.uint64:
    return _U(_rotate(_U(value ^ _U(word * _P1)), 23) * _P2 + _P3)


@nb.njit(inline="always")
def _mix_byte(value: np.uint64, byte: np.uint64) -> np.uint64:
    return _U(_rotate(_U(value ^ _U(byte * _P5)), 11) * _P1)


@nb.njit(inline="always")
def _avalanche(value: np.uint64) -> np.uint64:
    value = _U(_U(value ^ (value >> _U(33))) * _P2)
    value = _U(_U(value ^ (value >> _U(29))) * _P3)
    return _U(value ^ (value >> _U(32)))


@nb.njit(nogil=True, cache=True)
def xxh64_even(rows: np.ndarray, length: int, values: np.ndarray) -> None:
    """XXH64 of a matrix of messages (hashing.py) that are all `length` bytes long, fewer than 32."""
    n, whole = len(values), length // 4
    for i in range(n):
        values[i] = _U(_P5 + _U(length))
    for k in range(0, whole - 1, 2):
        low, high = rows[k], rows[k + 1]
        for i in range(n):
            values[i] = _mix_eight(values[i], _U(_U(low[i]) | (_U(high[i]) << _U(32))))
    if whole % 2:
        low = rows[whole - 1]
        for i in range(n):
            values[i] = _mix_four(values[i], _U(low[i]))
    rest = rows[ROWS - 1]
    for k in range(length % 4):
        for i in range(n):
            values[i] = _mix_byte(values[i], _U((rest[i] >> np.uint32(8 * k)) & np.uint32(0xFF)))
    for i in range(n):
        values[i] = _avalanche(values[i])


@nb.njit(nogil=True, cache=True)
def xxh64(data: np.ndarray, start: int, end: int) -> np.uint64:
    """XXH64 with seed 0 of data[start:end] (github.com/Cyan4973/xxHash, doc/xxhash_spec.md)."""
    at, last, length = np.uintp(start), np.uintp(end), end - start
    value = _P5
    if length >= 32:
        v1, v2, v3, v4 = _U(_P1 + _P2), _P2, _U(0), _U(_U(0) - _P1)
        while at + np.uintp(32) <= last:
            v1, v2 = _round(v1, _word(data, at)), _round(v2, _word(data, at + np.uintp(8)))
            v3, v4 = _round(v3, _word(data, at + np.uintp(16))), _round(v4, _word(data, at + np.uintp(24)))
            at += np.uintp(32)
        value = _U(_U(_rotate(v1, 1) + _rotate(v2, 7)) + _U(_rotate(v3, 12) + _rotate(v4, 18)))
        for lane in (v1, v2, v3, v4):
            value = _U(_U(value ^ _round(_U(0), lane)) * _P1 + _P4)
    value = _U(value + _U(length))
    while at + np.uintp(8) <= last:
        value = _mix_eight(value, _word(data, at))
        at += np.uintp(8)
    if at + np.uintp(4) <= last:
        value = _mix_four(value, _U(word(data, at)))
        at += np.uintp(4)
    while at < last:
        value = _mix_byte(value, _U(data[at]))
        at += np.uintp(1)
    return _avalanche(value)
