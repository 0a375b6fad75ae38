"""Messages to hash side by side, as a matrix of 32-bit words.

Hashing many short messages in one loop lets a SIMD instruction work on several of them at once.
`words` is a uint32 matrix (WORDS × messages): words[k, i] is word k of message i, four bytes,
little-endian; the last row holds each message's tail, the up to three bytes after its whole words,
padded with zeros.

All arithmetic is modulo 2^32. numba widens integers in every operation, so each result is narrowed
again.
"""

import numpy as np

from gristmill.kernels import kernel

_U = np.uint32
WORDS = 17  # rows of the matrix: 16 whole words and the tail
MAX_BYTES = 64  # length of the longest message that fits


@kernel(inline="always")
def rotate_left(value: np.uint32, bits: int) -> np.uint32:
    """Rotate a 32-bit value left by `bits`."""
    return _U((_U(value) << _U(bits)) | (_U(value) >> _U(32 - bits)))


@kernel(inline="always")
def load_word(data: np.ndarray, at: np.uintp) -> np.uint32:
    """Return the four bytes from data[at] on, little-endian.

    `at` is unsigned: numba then skips the negative-index checks.
    """
    low = _U(data[at]) | (_U(data[at + np.uintp(1)]) << _U(8))
    return _U(low | (_U(data[at + np.uintp(2)]) << _U(16)) | (_U(data[at + np.uintp(3)]) << _U(24)))


@kernel
def gather_fixed(data: np.ndarray, length: int, count: int, words: np.ndarray, scratch: np.ndarray) -> None:
    """Fill `words` with the windows data[i : i + length], i < count.

    `scratch` is uint32, at least count + MAX_BYTES long. Reading bytes through four shifted views lets
    the compiler load them in vectors instead of one by one.
    """
    whole = length // 4
    second = data[1:]
    third = data[2:]
    fourth = data[3:]
    for i in range(count + 4 * whole):
        low = _U(data[i]) | (_U(second[i]) << _U(8))
        scratch[i] = _U(low | (_U(third[i]) << _U(16)) | (_U(fourth[i]) << _U(24)))
    mask = _U((1 << (length % 4 * 8)) - 1)
    for k in range(whole + 1):
        word_k = words[k if k < whole else WORDS - 1]
        shifted = scratch[4 * k :]
        for i in range(count):
            word_k[i] = shifted[i] if k < whole else _U(shifted[i] & mask)


@kernel
def gather_varying(
    data: np.ndarray, starts: np.ndarray, lengths: np.ndarray, max_length: int, words: np.ndarray
) -> None:
    """Fill `words` with the messages data[starts[i]:][:lengths[i]], each at most `max_length` bytes long."""
    for k in range(max_length // 4):
        word_k = words[k]
        for i in range(len(starts)):
            word_k[i] = load_word(data, np.uintp(starts[i]) + np.uintp(4 * k))
    tails = words[WORDS - 1]
    for i in range(len(starts)):
        mask = _U((_U(1) << _U(lengths[i] % _U(4) * _U(8))) - _U(1))
        tails[i] = _U(load_word(data, np.uintp(starts[i]) + np.uintp(lengths[i] & _U(0xFFFFFFFC))) & mask)
