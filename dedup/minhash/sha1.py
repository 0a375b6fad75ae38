"""The first 32 bits of SHA-1 (FIPS 180-4), compiled: of one message, and of many side by side (message_words.py).

One SIMD instruction works on as many messages as fit into a register: the eighty rounds of a block
are unrolled into straight-line code, which the compiler vectorises over messages.
"""

import numpy as np

from dedup.minhash.message_words import WORDS, rotate_left
from gristmill.kernels import kernel

_U = np.uint32
_A, _B, _C, _D, _E = map(_U, (0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0))
_CONSTANTS = tuple(map(_U, (0x5A827999, 0x6ED9EBA1, 0x8F1BBCDC, 0xCA62C1D6)))
_ROUND_CONSTANTS = np.array(_CONSTANTS, np.uint32)
ONE_BLOCK_BYTES = 55  # of a message that fits into one block with its padding
_State = tuple[np.uint32, np.uint32, np.uint32, np.uint32, np.uint32]


@kernel
def sha1_32_varying(words: np.ndarray, lengths: np.ndarray, max_length: int, hashes: np.ndarray) -> None:
    """Write to `hashes` (uint32) SHA-1's first four bytes, little-endian, of messages of lengths[i] ≤ max_length bytes.

    max_length ≤ ONE_BLOCK_BYTES; `words` is overwritten.
    """
    _pad(words, lengths, max_length)
    r0 = words[0]
    r1 = words[1]
    r2 = words[2]
    r3 = words[3]
    r4 = words[4]
    r5 = words[5]
    r6 = words[6]
    r7 = words[7]
    r8 = words[8]
    r9 = words[9]
    r10 = words[10]
    r11 = words[11]
    r12 = words[12]
    r13 = words[13]
    r15 = words[15]
    for i in range(len(hashes)):
        schedule = (r0[i], r1[i], r2[i], r3[i], r4[i], r5[i], r6[i], r7[i],
                    r8[i], r9[i], r10[i], r11[i], r12[i], r13[i], _U(0), r15[i])  # fmt: skip
        state = (_A, _B, _C, _D, _E)
        state, schedule = _twenty_rounds(state, schedule, 0)
        state, schedule = _twenty_rounds(state, schedule, 20)
        state, schedule = _twenty_rounds(state, schedule, 40)
        state, schedule = _twenty_rounds(state, schedule, 60)
        hashes[i] = _swap_bytes(_U(state[0] + _A))


@kernel
def _pad(words: np.ndarray, lengths: np.ndarray, max_length: int) -> None:
    """Turn messages into padded blocks, in place (section 5.1.1): big-endian words, a 1 bit, zeros, length in bits."""
    tails = words[WORDS - 1]
    n = len(lengths)
    for k in range(max_length // 4 + 1):
        word_k = words[k]
        for i in range(n):
            whole = lengths[i] >> _U(2)
            end = _U(tails[i] | _U(_U(0x80) << _U((lengths[i] & _U(3)) * _U(8)))) if whole == _U(k) else _U(0)
            word_k[i] = _swap_bytes(word_k[i] if whole > _U(k) else end)
    for k in range(max_length // 4 + 1, 14):
        word_k = words[k]
        for i in range(n):
            word_k[i] = _U(0)
    last = words[15]
    for i in range(n):
        last[i] = _U(lengths[i] * _U(8))


@kernel(forceinline=True)
def _twenty_rounds(state: _State, schedule: tuple, t: int) -> tuple[_State, tuple]:
    """Run rounds t to t + 19, which share a constant and a logical function."""
    state, schedule = _five_rounds(state, schedule, t)
    state, schedule = _five_rounds(state, schedule, t)
    state, schedule = _five_rounds(state, schedule, t)
    return _five_rounds(state, schedule, t)


@kernel(forceinline=True)
def _five_rounds(state: _State, schedule: tuple, t: int) -> tuple[_State, tuple]:
    state, schedule = _round(state, schedule, t)
    state, schedule = _round(state, schedule, t)
    state, schedule = _round(state, schedule, t)
    state, schedule = _round(state, schedule, t)
    return _round(state, schedule, t)


@kernel(forceinline=True)
def _round(state: _State, schedule: tuple, t: int) -> tuple[_State, tuple]:
    """Run one round; return the new state and the next sixteen words of the schedule."""
    a, b, c, d, e = state
    total = _U(_U(_U(rotate_left(a, 5) + _logical(t, b, c, d)) + _U(e + _CONSTANTS[t // 20])) + schedule[0])
    new = rotate_left(_U(schedule[13] ^ schedule[8] ^ schedule[2] ^ schedule[0]), 1)
    return (total, a, rotate_left(b, 30), c, d), schedule[1:] + (new,)


@kernel(forceinline=True)
def _logical(t: int, b: np.uint32, c: np.uint32, d: np.uint32) -> np.uint32:
    """Round t's logical function: Ch, Parity, Maj, Parity (section 4.1.1)."""
    if t < 20:
        return _U((b & c) | (~b & d))
    if 40 <= t < 60:
        return _U((b & c) | (b & d) | (c & d))
    return _U(b ^ c ^ d)


@kernel(inline="always")
def _swap_bytes(value: np.uint32) -> np.uint32:
    """Reverse the order of the four bytes."""
    high = (value << _U(24)) | ((value << _U(8)) & _U(0xFF0000))
    return _U(high | ((value >> _U(8)) & _U(0xFF00)) | (value >> _U(24)))


@kernel
def sha1_32(data: np.ndarray, start: int, end: int, schedule: np.ndarray) -> np.uint32:
    """Return SHA-1's first four bytes, little-endian, of data[start:end] (uint8); `schedule` is scratch, 80 uint32."""
    state = np.array((_A, _B, _C, _D, _E), np.uint32)
    length = end - start
    for block in range((length + 8) // 64 + 1):
        _load(data, start, length, block, schedule)
        _compress(state, schedule)
    return _swap_bytes(state[0])


@kernel
def _load(data: np.ndarray, start: int, length: int, block: int, schedule: np.ndarray) -> None:
    """Write the message schedule of one padded block, 80 words, to `schedule` (section 6.1.2, step 1)."""
    last = (length + 8) // 64
    for t in range(16):
        value = _U(0)
        for k in range(4):
            at = block * 64 + t * 4 + k
            byte = _U(0)
            if at < length:
                byte = _U(data[start + at])
            elif at == length:
                byte = _U(0x80)
            value = _U((value << _U(8)) | byte)
        schedule[t] = value
    if block == last:
        schedule[14] = _U((length * 8) >> 32)
        schedule[15] = _U(length * 8)
    for t in range(16, 80):
        schedule[t] = rotate_left(schedule[t - 3] ^ schedule[t - 8] ^ schedule[t - 14] ^ schedule[t - 16], 1)


@kernel
def _compress(state: np.ndarray, schedule: np.ndarray) -> None:
    """Run the eighty rounds of a block and add the result to the state (section 6.1.2, steps 2 to 4)."""
    a = state[0]
    b = state[1]
    c = state[2]
    d = state[3]
    e = state[4]
    for t in range(80):
        total = _U(_U(rotate_left(a, 5) + _logical(t, b, c, d)) + _U(_U(e + schedule[t]) + _ROUND_CONSTANTS[t // 20]))
        e = d
        d = c
        c = rotate_left(b, 30)
        b = a
        a = total
    state[0] = _U(state[0] + a)
    state[1] = _U(state[1] + b)
    state[2] = _U(state[2] + c)
    state[3] = _U(state[3] + d)
    state[4] = _U(state[4] + e)
