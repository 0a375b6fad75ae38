"""Base hashes of shingles, compiled: XXH32 and SHA-1, over bytes, and the finaliser fmix32.

All arithmetic is modulo 2^32; numba widens integers at every step, so each is narrowed again. What
is compiled is kept by the age of its own file: after a change here, `touch minhash.py`, which calls it.
"""

import numba as nb
import numpy as np

_U = np.uint32
_P1, _P2, _P3, _P4, _P5 = map(_U, (2654435761, 2246822519, 3266489917, 668265263, 374761393))
_SHA1_STATE = np.array([0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0], np.uint32)
_SHA1_ROUND = np.array([0x5A827999, 0x6ED9EBA1, 0x8F1BBCDC, 0xCA62C1D6], np.uint32)
LANES = 256  # messages hashed side by side
SHA1_ROWS = 22
ONE_BLOCK = 55  # bytes of a message that SHA-1 hashes in one block


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
def avalanche(value: np.uint32) -> np.uint32:
    """The end of XXH32."""
    value = _U(value ^ (value >> _U(15)))
    value = _U(value * _P2)
    value = _U(value ^ (value >> _U(13)))
    value = _U(value * _P3)
    return _U(value ^ (value >> _U(16)))


@nb.njit(inline="always")
def word(data: np.ndarray, at: int) -> np.uint32:
    """Four bytes, little-endian."""
    low = _U(data[at]) | (_U(data[at + 1]) << _U(8))
    return _U(low | (_U(data[at + 2]) << _U(16)) | (_U(data[at + 3]) << _U(24)))


@nb.njit(nogil=True, cache=True)
def xxh32(data: np.ndarray, start: int, end: int) -> np.uint32:
    """XXH32 with seed 0 of data[start:end] (github.com/Cyan4973/xxHash, doc/xxhash_spec.md)."""
    at, length = start, end - start
    if length >= 16:
        lanes = (_U(_P1 + _P2), _P2, _U(0), _U(_U(0) - _P1))
        v1, v2, v3, v4 = lanes
        while at + 16 <= end:
            v1 = _U(rotate(_U(v1 + _U(word(data, at) * _P2)), 13) * _P1)
            v2 = _U(rotate(_U(v2 + _U(word(data, at + 4) * _P2)), 13) * _P1)
            v3 = _U(rotate(_U(v3 + _U(word(data, at + 8) * _P2)), 13) * _P1)
            v4 = _U(rotate(_U(v4 + _U(word(data, at + 12) * _P2)), 13) * _P1)
            at += 16
        value = _U(_U(rotate(v1, 1) + rotate(v2, 7)) + _U(rotate(v3, 12) + rotate(v4, 18)))
    else:
        value = _P5
    value = _U(value + _U(length))
    while at + 4 <= end:
        value = _U(rotate(_U(value + _U(word(data, at) * _P3)), 17) * _P4)
        at += 4
    while at < end:
        value = _U(rotate(_U(value + _U(_U(data[at]) * _P5)), 11) * _P1)
        at += 1
    return avalanche(value)


@nb.njit(nogil=True, cache=True)
def xxh32_windows(data: np.ndarray, width: int, values: np.ndarray, words: np.ndarray) -> None:
    """XXH32 of data[i : i + width] for every i < len(values), width < 16, vectorised over windows.

    `words` is scratch of len(values) + 12 items: bytes become words first, as the compiler would
    otherwise gather them.
    """
    n = len(values)
    for i in range(min(len(words), len(data) - 3)):
        words[i] = word(data, i)
    for i in range(n):
        values[i] = _U(_P5 + _U(width))
    for k in range(0, width - 3, 4):
        shifted = words[k : k + n]
        for i in range(n):
            values[i] = _U(rotate(_U(values[i] + _U(shifted[i] * _P3)), 17) * _P4)
    for k in range(width // 4 * 4, width):
        tail = data[k : k + n]
        for i in range(n):
            values[i] = _U(rotate(_U(values[i] + _U(_U(tail[i]) * _P5)), 11) * _P1)
    for i in range(n):
        values[i] = avalanche(values[i])


@nb.njit(nogil=True, cache=True)
def sha1_32(data: np.ndarray, start: int, end: int, schedule: np.ndarray) -> np.uint32:
    """The first four bytes of SHA-1 of data[start:end], little-endian (FIPS 180-4); `schedule` is scratch, 80 words."""
    state = _SHA1_STATE.copy()
    length = end - start
    for block in range((length + 8) // 64 + 1):
        _sha1_load(data, start, length, block, schedule)
        _sha1_compress(state, schedule)
    return _swap(state[0])


@nb.njit(nogil=True, cache=True)
def sha1_32_lanes(data: np.ndarray, starts: np.ndarray, ends: np.ndarray, values: np.ndarray, rows: np.ndarray) -> None:
    """sha1_32 of data[starts[i] : ends[i]], of ONE_BLOCK bytes at most, for LANES messages, vectorised over them.

    `rows` is scratch, SHA1_ROWS × LANES: 16 words of the message in a ring, and 6 links of a chain. The
    chain is SHA-1's a, round by round; its b, c, d and e are the a of one to four rounds ago, rotated.
    """
    words, chain = rows[:16], rows[16:]
    for lane in range(LANES):
        _sha1_pad(data[starts[lane] : ends[lane]], words[:, lane])
    for back in range(5):
        chain[4 - back] = _SHA1_STATE[back] if back < 2 else rotate(_SHA1_STATE[back], 2)
    for t in range(80):
        word = words[t % 16]
        if t >= 16:
            _sha1_expand(word, words[(t - 14) % 16], words[(t - 8) % 16], words[(t - 3) % 16])
        a, b, c = chain[(t + 4) % 6], chain[(t + 3) % 6], chain[(t + 2) % 6]
        _sha1_round(t, a, b, c, chain[(t + 1) % 6], chain[t % 6], word, chain[(t + 5) % 6])
    last = chain[84 % 6]
    for i in range(LANES):
        values[i] = _swap(_U(last[i] + _SHA1_STATE[0]))


@nb.njit(inline="always")
def _sha1_pad(message: np.ndarray, words: np.ndarray) -> None:
    """A message of at most ONE_BLOCK bytes as 16 big-endian words: itself, one bit, zeros, its length."""
    whole = len(message) // 4
    for k in range(whole):
        words[k] = _swap(word(message, 4 * k))
    tail = _U(0x80)
    for at in range(len(message) - 1, 4 * whole - 1, -1):
        tail = _U((tail << _U(8)) | _U(message[at]))
    words[whole] = _swap(tail)
    words[whole + 1 : 15] = 0
    words[15] = _U(len(message) * 8)


@nb.njit(nogil=True, cache=True)
def _sha1_expand(word: np.ndarray, w2: np.ndarray, w8: np.ndarray, w13: np.ndarray) -> None:
    for i in range(LANES):
        word[i] = rotate(word[i] ^ w2[i] ^ w8[i] ^ w13[i], 1)


@nb.njit(nogil=True, cache=True)
def _sha1_round(
    t: int, a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, e: np.ndarray, word: np.ndarray, new: np.ndarray
) -> None:
    constant = _SHA1_ROUND[t // 20]
    for i in range(LANES):
        mixed = _sha1_mix(t, b[i], rotate(c[i], 30), rotate(d[i], 30))
        new[i] = _U(_U(rotate(a[i], 5) + mixed) + _U(_U(rotate(e[i], 30) + word[i]) + constant))


@nb.njit(inline="always")
def _swap(value: np.uint32) -> np.uint32:
    """The four bytes the other way round."""
    high = (value << _U(24)) | ((value << _U(8)) & _U(0xFF0000))
    return _U(high | ((value >> _U(8)) & _U(0xFF00)) | (value >> _U(24)))


@nb.njit(inline="always")
def _sha1_mix(t: int, b: np.uint32, c: np.uint32, d: np.uint32) -> np.uint32:
    if t < 20:
        return _U((b & c) | (~b & d))
    if 40 <= t < 60:
        return _U((b & c) | (b & d) | (c & d))
    return _U(b ^ c ^ d)


@nb.njit(nogil=True, cache=True)
def _sha1_load(data: np.ndarray, start: int, length: int, block: int, schedule: np.ndarray) -> None:
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
def _sha1_compress(state: np.ndarray, schedule: np.ndarray) -> None:
    a, b, c, d, e = state[0], state[1], state[2], state[3], state[4]
    for t in range(80):
        total = _U(_U(rotate(a, 5) + _sha1_mix(t, b, c, d)) + _U(_U(e + schedule[t]) + _SHA1_ROUND[t // 20]))
        a, b, c, d, e = total, a, rotate(b, 30), c, d
    state[0] = _U(state[0] + a)
    state[1] = _U(state[1] + b)
    state[2] = _U(state[2] + c)
    state[3] = _U(state[3] + d)
    state[4] = _U(state[4] + e)
