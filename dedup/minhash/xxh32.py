"""XXH32 and fmix32, compiled: of one message, and of many side by side.

Messages side by side lie in `rows`, a matrix of uint32: rows[k][i] is the k-th word (four bytes,
little-endian) of message i, and the last row holds what is left after its whole words, bytes past
its end being 0. All arithmetic is modulo 2^32; numba widens integers at every step, so each is
narrowed again. What is compiled is kept by the age of its own file: after a change here, `touch`
the modules that import it.
"""

import numba as nb
import numpy as np

_U = np.uint32
_P1, _P2, _P3, _P4, _P5 = map(_U, (2654435761, 2246822519, 3266489917, 668265263, 374761393))
ROWS = 17  # of a message matrix: 16 words and the rest
LONGEST = 64  # bytes of a message that fits
STRIPE = 16  # bytes from which on XXH32 is another


@nb.njit(inline="always")
def rotate(value: np.uint32, bits: int) -> np.uint32:
    """Rotate 32 bits to the left."""
    return _U((_U(value) << _U(bits)) | (_U(value) >> _U(32 - bits)))


@nb.njit(inline="always")
def fmix32(value: np.uint32) -> np.uint32:
    """MurmurHash3's finaliser: a bijection that spreads every bit over all."""
    value = _U(value ^ (value >> _U(16)))
    value = _U(value * _U(0x85EBCA6B))
    value = _U(value ^ (value >> _U(13)))
    value = _U(value * _U(0xC2B2AE35))
    return _U(value ^ (value >> _U(16)))


@nb.njit(inline="always")
def _avalanche(value: np.uint32) -> np.uint32:
    """The end of XXH32."""
    value = _U(value ^ (value >> _U(15)))
    value = _U(value * _P2)
    value = _U(value ^ (value >> _U(13)))
    value = _U(value * _P3)
    return _U(value ^ (value >> _U(16)))


@nb.njit(inline="always")
def word(data: np.ndarray, at: np.uintp) -> np.uint32:
    """Four bytes, little-endian; `at` is unsigned, as numba would ask of every byte whether to count from the end."""
    low = _U(data[at]) | (_U(data[at + np.uintp(1)]) << _U(8))
    return _U(low | (_U(data[at + np.uintp(2)]) << _U(16)) | (_U(data[at + np.uintp(3)]) << _U(24)))


@nb.njit(inline="always")
def _stripe(lane: np.uint32, word: np.uint32) -> np.uint32:
    return _U(rotate(_U(lane + _U(word * _P2)), 13) * _P1)


@nb.njit(inline="always")
def _mix_word(value: np.uint32, word: np.uint32) -> np.uint32:
    return _U(rotate(_U(value + _U(word * _P3)), 17) * _P4)


@nb.njit(inline="always")
def _mix_byte(value: np.uint32, byte: np.uint32) -> np.uint32:
    return _U(rotate(_U(value + _U(byte * _P5)), 11) * _P1)


@nb.njit(inline="always")
def _merge(v1: np.uint32, v2: np.uint32, v3: np.uint32, v4: np.uint32) -> np.uint32:
    return _U(_U(rotate(v1, 1) + rotate(v2, 7)) + _U(rotate(v3, 12) + rotate(v4, 18)))


@nb.njit(nogil=True, cache=True)
def xxh32(data: np.ndarray, start: int, end: int) -> np.uint32:
    """XXH32 with seed 0 of data[start:end] (github.com/Cyan4973/xxHash, doc/xxhash_spec.md)."""
    at, last, value = np.uintp(start), np.uintp(end), _P5
    if end - start >= 16:
        v1, v2, v3, v4 = _U(_P1 + _P2), _P2, _U(0), _U(_U(0) - _P1)
        while at + np.uintp(16) <= last:
            v1, v2 = _stripe(v1, word(data, at)), _stripe(v2, word(data, at + np.uintp(4)))
            v3, v4 = _stripe(v3, word(data, at + np.uintp(8))), _stripe(v4, word(data, at + np.uintp(12)))
            at += np.uintp(16)
        value = _merge(v1, v2, v3, v4)
    value = _U(value + _U(end - start))
    while at + np.uintp(4) <= last:
        value = _mix_word(value, word(data, at))
        at += np.uintp(4)
    while at < last:
        value = _mix_byte(value, _U(data[at]))
        at += np.uintp(1)
    return _avalanche(value)


@nb.njit(nogil=True, cache=True)
def gather_even(data: np.ndarray, length: int, count: int, rows: np.ndarray, words: np.ndarray) -> None:
    """The messages data[i : i + length] for i < count as a matrix; `words` is scratch of count + LONGEST items.

    Bytes are read from four views, as the compiler would otherwise gather words one by one.
    """
    whole = length // 4
    second, third, fourth = data[1:], data[2:], data[3:]
    for i in range(count + 4 * whole):
        low = _U(data[i]) | (_U(second[i]) << _U(8))
        words[i] = _U(low | (_U(third[i]) << _U(16)) | (_U(fourth[i]) << _U(24)))
    mask = _U((1 << (length % 4 * 8)) - 1)
    for k in range(whole + 1):
        row, shifted = rows[k if k < whole else ROWS - 1], words[4 * k :]
        for i in range(count):
            row[i] = shifted[i] if k < whole else _U(shifted[i] & mask)


@nb.njit(nogil=True, cache=True)
def gather_uneven(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, most: int, rows: np.ndarray) -> None:
    """The messages data[starts[i] : starts[i] + lengths[i]], of `most` bytes at most, as a matrix."""
    for k in range(most // 4):
        row = rows[k]
        for i in range(len(starts)):
            row[i] = word(data, np.uintp(starts[i]) + np.uintp(4 * k))
    rest = rows[ROWS - 1]
    for i in range(len(starts)):
        mask = _U((_U(1) << _U(lengths[i] % _U(4) * _U(8))) - _U(1))
        rest[i] = _U(word(data, np.uintp(starts[i]) + np.uintp(lengths[i] & _U(0xFFFFFFFC))) & mask)


@nb.njit(nogil=True, cache=True)
def xxh32_even(rows: np.ndarray, length: int, values: np.ndarray) -> None:
    """XXH32 of a matrix of messages that are all `length` bytes long, fewer than STRIPE."""
    n = len(values)
    for i in range(n):
        values[i] = _U(_P5 + _U(length))
    for k in range(length // 4):
        row = rows[k]
        for i in range(n):
            values[i] = _mix_word(values[i], row[i])
    rest = rows[ROWS - 1]
    for k in range(length % 4):
        for i in range(n):
            values[i] = _mix_byte(values[i], _U((rest[i] >> _U(8 * k)) & _U(0xFF)))
    for i in range(n):
        values[i] = _avalanche(values[i])


@nb.njit(nogil=True, cache=True)
def xxh32_uneven(rows: np.ndarray, lengths: np.ndarray, most: int, values: np.ndarray, lanes: np.ndarray) -> None:
    """XXH32 of a matrix of messages, lengths[i] bytes long and `most` at most; `lanes` is scratch, 4 × as many."""
    _mix_stripes(rows, lengths, most, values, lanes)
    for k in range(most // 4):
        row = rows[k]
        for i in range(len(values)):
            inside = (_U(4 * k + 4) <= lengths[i]) & (_U(4 * k) >= (lengths[i] & _U(0xFFFFFFF0)))
            values[i] = _mix_word(values[i], row[i]) if inside else values[i]
    rest = rows[ROWS - 1]
    for k in range(3):
        for i in range(len(values)):
            mixed = _mix_byte(values[i], _U((rest[i] >> _U(8 * k)) & _U(0xFF)))
            values[i] = mixed if (lengths[i] & _U(3)) > _U(k) else values[i]
    for i in range(len(values)):
        values[i] = _avalanche(values[i])


@nb.njit(nogil=True, cache=True)
def _mix_stripes(rows: np.ndarray, lengths: np.ndarray, most: int, values: np.ndarray, lanes: np.ndarray) -> None:
    n = len(values)
    v1, v2, v3, v4 = lanes[0], lanes[1], lanes[2], lanes[3]
    for i in range(n):
        v1[i], v2[i], v3[i], v4[i] = _U(_P1 + _P2), _P2, _U(0), _U(_U(0) - _P1)
    for k in range(most // 16 * 4):
        lane, row, end = lanes[k % 4], rows[k], _U((k // 4 + 1) * 16)
        for i in range(n):
            lane[i] = _stripe(lane[i], row[i]) if lengths[i] >= end else lane[i]
    for i in range(n):
        values[i] = _U((_merge(v1[i], v2[i], v3[i], v4[i]) if lengths[i] >= _U(16) else _P5) + lengths[i])
