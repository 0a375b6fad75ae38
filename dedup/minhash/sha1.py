"""The first 32 bits of SHA-1 (FIPS 180-4), compiled: of one message, and of many side by side.

Side by side one instruction works on as many messages as fit into a register, in step: all eighty
rounds of one block are straight-line code. See hashing.py for the matrix of messages.
"""

import numba as nb
import numpy as np

from dedup.minhash.xxh32 import ROWS, rotate

_U = np.uint32
_A, _B, _C, _D, _E = map(_U, (0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0))
_ROUND = tuple(map(_U, (0x5A827999, 0x6ED9EBA1, 0x8F1BBCDC, 0xCA62C1D6)))
_ROUNDS = np.array(_ROUND, np.uint32)
ONE_BLOCK = 55  # bytes of a message that is hashed in one block
_State = tuple[np.uint32, np.uint32, np.uint32, np.uint32, np.uint32]


@nb.njit(nogil=True, cache=True)
def sha1_rows(rows: np.ndarray, lengths: np.ndarray, most: int, values: np.ndarray) -> None:
    """The first four bytes of each SHA-1, little-endian, of a matrix of messages, `most` ≤ ONE_BLOCK bytes at most."""
    _pad(rows, lengths, most)
    r0, r1, r2, r3, r4, r5, r6, r7 = rows[0], rows[1], rows[2], rows[3], rows[4], rows[5], rows[6], rows[7]
    r8, r9, r10, r11, r12, r13, r15 = rows[8], rows[9], rows[10], rows[11], rows[12], rows[13], rows[15]
    for i in range(len(values)):
        words = (r0[i], r1[i], r2[i], r3[i], r4[i], r5[i], r6[i], r7[i],
                 r8[i], r9[i], r10[i], r11[i], r12[i], r13[i], _U(0), r15[i])  # fmt: skip
        state = (_A, _B, _C, _D, _E)
        state, words = _twenty(state, words, 0)
        state, words = _twenty(state, words, 20)
        state, words = _twenty(state, words, 40)
        state, words = _twenty(state, words, 60)
        values[i] = _swap(_U(state[0] + _A))


@nb.njit(nogil=True, cache=True)
def _pad(rows: np.ndarray, lengths: np.ndarray, most: int) -> None:
    """Make a matrix of messages one of SHA-1's blocks: big-endian, then one bit, zeros, and the length in bits."""
    rest, n = rows[ROWS - 1], len(lengths)
    for k in range(most // 4 + 1):
        row = rows[k]
        for i in range(n):
            whole = lengths[i] >> _U(2)
            end = _U(rest[i] | _U(_U(0x80) << _U((lengths[i] & _U(3)) * _U(8)))) if whole == _U(k) else _U(0)
            row[i] = _swap(row[i] if whole > _U(k) else end)
    for k in range(most // 4 + 1, 14):
        row = rows[k]
        for i in range(n):
            row[i] = _U(0)
    last = rows[15]
    for i in range(n):
        last[i] = _U(lengths[i] * _U(8))


@nb.njit(forceinline=True)
def _twenty(state: _State, words: tuple, t: int) -> tuple[_State, tuple]:
    """Rounds t to t + 19."""
    state, words = _five(state, words, t)
    state, words = _five(state, words, t)
    state, words = _five(state, words, t)
    return _five(state, words, t)


@nb.njit(forceinline=True)
def _five(state: _State, words: tuple, t: int) -> tuple[_State, tuple]:
    state, words = _round(state, words, t)
    state, words = _round(state, words, t)
    state, words = _round(state, words, t)
    state, words = _round(state, words, t)
    return _round(state, words, t)


@nb.njit(forceinline=True)
def _round(state: _State, words: tuple, t: int) -> tuple[_State, tuple]:
    """One round, and the sixteen words that the next ones take."""
    a, b, c, d, e = state
    total = _U(_U(_U(rotate(a, 5) + _mix(t, b, c, d)) + _U(e + _ROUND[t // 20])) + words[0])
    new = rotate(_U(words[13] ^ words[8] ^ words[2] ^ words[0]), 1)
    return (total, a, rotate(b, 30), c, d), words[1:] + (new,)


@nb.njit(forceinline=True)
def _mix(t: int, b: np.uint32, c: np.uint32, d: np.uint32) -> np.uint32:
    if t < 20:
        return _U((b & c) | (~b & d))
    if 40 <= t < 60:
        return _U((b & c) | (b & d) | (c & d))
    return _U(b ^ c ^ d)


@nb.njit(inline="always")
def _swap(value: np.uint32) -> np.uint32:
    """The four bytes the other way round."""
    high = (value << _U(24)) | ((value << _U(8)) & _U(0xFF0000))
    return _U(high | ((value >> _U(8)) & _U(0xFF00)) | (value >> _U(24)))


@nb.njit(nogil=True, cache=True)
def sha1_32(data: np.ndarray, start: int, end: int, schedule: np.ndarray) -> np.uint32:
    """The same of data[start:end], of any length; `schedule` is scratch, 80 words."""
    state = np.array((_A, _B, _C, _D, _E), np.uint32)
    length = end - start
    for block in range((length + 8) // 64 + 1):
        _load(data, start, length, block, schedule)
        _compress(state, schedule)
    return _swap(state[0])


@nb.njit(nogil=True, cache=True)
def _load(data: np.ndarray, start: int, length: int, block: int, schedule: np.ndarray) -> None:
    """One padded block of the message, expanded to 80 words."""
    last = (length + 8) // 64
    for t in range(16):
        value = _U(0)
        for k in range(4):
            at = block * 64 + t * 4 + k
            byte = _U(data[start + at]) if at < length else _U(0x80 if at == length else 0)
            value = _U((value << _U(8)) | byte)
        schedule[t] = value
    if block == last:
        schedule[14] = _U((length * 8) >> 32)
        schedule[15] = _U(length * 8)
    for t in range(16, 80):
        schedule[t] = rotate(schedule[t - 3] ^ schedule[t - 8] ^ schedule[t - 14] ^ schedule[t - 16], 1)


@nb.njit(nogil=True, cache=True)
def _compress(state: np.ndarray, schedule: np.ndarray) -> None:
    a, b, c, d, e = state[0], state[1], state[2], state[3], state[4]
    for t in range(80):
        total = _U(_U(rotate(a, 5) + _mix(t, b, c, d)) + _U(_U(e + schedule[t]) + _ROUNDS[t // 20]))
        a, b, c, d, e = total, a, rotate(b, 30), c, d
    state[0] = _U(state[0] + a)
    state[1] = _U(state[1] + b)
    state[2] = _U(state[2] + c)
    state[3] = _U(state[3] + d)
    state[4] = _U(state[4] + e)
