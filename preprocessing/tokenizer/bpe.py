"""Byte-pair encoding, compiled: the characters of a text are merged into pieces.

A text starts as its characters. Of all neighbours that together are a piece, those whose piece has the
highest score, of these the leftmost, become one; this until no two neighbours are a piece (Sennrich et
al. 2016, arXiv:1508.07909; scores and ties as in SentencePiece). A character that is no piece becomes its
UTF-8 bytes, or the unknown piece, of which a run of such characters has but one.

Arguments are arrays rather than Merges where it matters: to hand over a tuple of arrays costs more than a look-up.
"""

import heapq
from typing import NamedTuple

import numba as nb
import numpy as np
from numpy.typing import NDArray

ASCII = 128
JOINT_BITS = 22
LONGEST = 64  # bytes of a text that is merged by looking at all neighbours each time
_SPACE = 32
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_LOW = np.uint64(0xFFFFFFFF)
_EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)


class Merges(NamedTuple):
    """A vocabulary as the kernel needs it. A symbol is the id of a piece, or -1 - c for a character c that is none."""

    symbols: NDArray[np.int32]  # of every code point
    ascii_joints: NDArray[np.bool_]  # [128 · a + b]: some piece holds b directly after a
    joints: NDArray[np.uint8]  # the same of all characters, a bit for a hash: set where it must be, and a little more
    keys: NDArray[np.uint64]  # open addressing: two symbols, or _EMPTY
    merged: NDArray[np.int32]  # the piece that the two make
    scores: NDArray[np.float32]  # of every piece
    byte_ids: NDArray[np.int32]  # the pieces of the 256 bytes; none where unknown characters become `unknown`
    unknown: int


def merge_table(pairs: list[tuple[int, int]], pieces: list[int]) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """`keys` and `merged` of Merges: what each pair of symbols makes."""
    size = 1 << (2 * len(pairs) + 2).bit_length()
    keys, merged = np.full(size, _EMPTY, np.uint64), np.zeros(size, np.int32)
    if pairs:
        _fill(keys, merged, np.array(pairs, np.int64), np.array(pieces, np.int32))
    return keys, merged


@nb.njit(cache=True, nogil=True)
def joint_tables(pairs: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
    """`ascii_joints` and `joints` of Merges, from the code points (n × 2) that pieces hold one after the other."""
    ascii_joints = np.zeros(ASCII * ASCII, np.bool_)
    joints = np.zeros(1 << (JOINT_BITS - 3), np.uint8)
    for i in range(len(pairs)):
        a, b = pairs[i]
        if a < ASCII and b < ASCII:
            ascii_joints[a * ASCII + b] = True
        bit = joint(a, b)
        joints[bit >> 3] |= np.uint8(1 << (bit & 7))
    return ascii_joints, joints


@nb.njit(cache=True, nogil=True)
def merge_short(data, at, cut, merges, scratch):  # type: ignore[no-untyped-def]
    """Merge by looking at all neighbours each time; ids at the front of `scratch`, their number is returned."""
    symbols, made = scratch[3 * LONGEST : 4 * LONGEST], scratch[4 * LONGEST :]
    keys, merged, scores = merges.keys, merges.merged, merges.scores
    n = 0
    while at < cut:
        character, at = decode(data, at)
        symbols[n] = merges.symbols[character]
        n += 1
    for i in range(n - 1):
        made[i] = _merged(symbols[i], symbols[i + 1], keys, merged)
    while True:
        best, score = -1, np.float32(-np.inf)
        for i in range(n - 1):
            if made[i] >= 0 and (best < 0 or scores[made[i]] > score):
                best, score = i, scores[made[i]]
        if best < 0:
            break
        symbols[best] = made[best]
        n -= 1
        for i in range(best + 1, n):
            symbols[i], made[i - 1] = symbols[i + 1], made[i]
        if best > 0:
            made[best - 1] = _merged(symbols[best - 1], symbols[best], keys, merged)
        if best + 1 < n:
            made[best] = _merged(symbols[best], symbols[best + 1], keys, merged)
    count = 0
    for i in range(n):
        count = _append_symbol(scratch, count, 0, symbols[i], merges)
    return count


@nb.njit(cache=True, nogil=True)
def encode_long(data, at, cut, merges, ids, n, first):  # type: ignore[no-untyped-def]
    """Append the ids of a text too long to look at all neighbours each time: a heap finds the best."""
    symbols, keys, merged = np.empty(cut - at, np.int32), merges.keys, merges.merged
    size = 0
    while at < cut:
        character, at = decode(data, at)
        symbols[size] = merges.symbols[character]
        size += 1
    before, after = np.arange(-1, size - 1), np.arange(1, size + 1)
    alive = np.ones(size, np.bool_)
    heap = [(np.float32(0), i, i, np.int32(0), np.int32(0)) for i in range(0)]
    for i in range(size - 1):
        _offer(heap, symbols, i, i + 1, merges)
    while heap:
        _, i, j, left, right = heapq.heappop(heap)
        if not (alive[i] and alive[j] and symbols[i] == left and symbols[j] == right):
            continue
        symbols[i] = _merged(left, right, keys, merged)
        alive[j], after[i] = False, after[j]
        if before[i] >= 0:
            _offer(heap, symbols, before[i], i, merges)
        if after[i] < size:
            before[after[i]] = i
            _offer(heap, symbols, i, after[i], merges)
    for i in range(size):
        if alive[i]:
            n = _append_symbol(ids, n, first, symbols[i], merges)
    return n


@nb.njit(cache=True, nogil=True)
def _offer(heap, symbols, i, j, merges):  # type: ignore[no-untyped-def]
    """Put two neighbours on the heap if they make a piece; the highest score comes first, then the leftmost."""
    piece = _merged(symbols[i], symbols[j], merges.keys, merges.merged)
    if piece >= 0:
        heapq.heappush(heap, (-merges.scores[piece], i, j, symbols[i], symbols[j]))


@nb.njit(cache=True, nogil=True, inline="always")
def _merged(left, right, keys, merged):  # type: ignore[no-untyped-def]
    """The piece that two symbols make, -1 if none."""
    key, mask, piece = _pair(left, right), len(keys) - 1, np.int32(-1)
    slot = _slot(key, mask)
    while keys[slot] != _EMPTY:
        if keys[slot] == key:
            piece = merged[slot]
            break
        slot = (slot + 1) & mask
    return piece


@nb.njit(cache=True, nogil=True)
def _fill(keys, merged, pairs, pieces):  # type: ignore[no-untyped-def]
    mask = len(keys) - 1
    for i in range(len(pairs)):
        key = _pair(pairs[i, 0], pairs[i, 1])
        slot = _slot(key, mask)
        while keys[slot] != _EMPTY:
            slot = (slot + 1) & mask
        keys[slot], merged[slot] = key, pieces[i]


@nb.njit(cache=True, nogil=True)
def _pair(left, right):  # type: ignore[no-untyped-def]
    return ((np.uint64(left) & _LOW) << np.uint64(32)) | (np.uint64(right) & _LOW)


@nb.njit(cache=True, nogil=True)
def _slot(key, mask):  # type: ignore[no-untyped-def]
    return np.int64((key * _MULTIPLIER) >> np.uint64(32)) & mask


@nb.njit(cache=True, nogil=True)
def joint(a, b):  # type: ignore[no-untyped-def]
    """The bit of two neighbouring characters."""
    key = (np.uint64(a) << np.uint64(21)) | np.uint64(b)
    return np.int64((key * _MULTIPLIER) >> np.uint64(64 - JOINT_BITS))


@nb.njit(cache=True, nogil=True)
def _append_symbol(ids, n, first, symbol, merges):  # type: ignore[no-untyped-def]
    if symbol < 0:
        return append_unknown(ids, n, first, -1 - symbol, merges)
    ids[n] = symbol
    return n + 1


@nb.njit(cache=True, nogil=True)
def append_unknown(ids, n, first, character, merges):  # type: ignore[no-untyped-def]
    """A character that is no piece: its bytes, or the unknown piece once for a run of them."""
    if len(merges.byte_ids) == 0:
        if n > first and ids[n - 1] == merges.unknown:
            return n
        ids[n] = merges.unknown
        return n + 1
    character = 0x2581 if character == _SPACE else character
    size = 1 + (character >= 0x80) + (character >= 0x800) + (character >= 0x10000)
    for i in range(size):
        lead = 0 if size == 1 else 0xF00 >> size & 0xFF  # 110…, 1110…, 11110…
        byte = (character >> 6 * (size - 1 - i)) & 0x3F | 0x80
        if i == 0:
            byte = lead | (character >> 6 * (size - 1))
        ids[n + i] = merges.byte_ids[byte]
    return n + size


@nb.njit(cache=True, nogil=True)
def decode(data, at):  # type: ignore[no-untyped-def]
    """The character at `at` of valid UTF-8, and where the next one begins."""
    lead = np.int64(data[at])
    if lead < 0x80:
        return lead, at + 1
    second = np.int64(data[at + 1]) & 0x3F
    if lead < 0xE0:
        return (lead & 0x1F) << 6 | second, at + 2
    third = np.int64(data[at + 2]) & 0x3F
    if lead < 0xF0:
        return (lead & 0x0F) << 12 | second << 6 | third, at + 3
    return (lead & 0x07) << 18 | second << 12 | third << 6 | np.int64(data[at + 3]) & 0x3F, at + 4
