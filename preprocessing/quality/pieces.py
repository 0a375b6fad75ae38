"""Pieces of a text: what is between its spaces, found by kernels in UTF-8, and looked up among those known by number.

A piece is known by a 64-bit hash of its bytes. Spaces are those of Python's `str.split`.
"""

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel

_SLOTS = 1 << 20  # of the table of known pieces, a power of two: 16 MiB
MAX_PIECES = _SLOTS // 2  # that are known, so that a search is short
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, of bits that look random
_SHIFT = np.uint64(29)
_NEWLINE = np.uint8(ord("\n"))
_ONE = np.uint64(1)
_TWO = np.uint64(2)
_THREE = np.uint64(3)
_SEVEN = np.uint64(7)
# Kinds of the first byte of a character: 0 of one that is no space.
_IS_SPACE = 1
_BEGINS_SPACE = 2  # of some of the characters that begin so
_KINDS = np.zeros(256, np.uint8)
_KINDS[[9, 10, 11, 12, 13, 28, 29, 30, 31, 32]] = _IS_SPACE
_KINDS[[0xC2, 0xE1, 0xE2, 0xE3]] = _BEGINS_SPACE


class PieceTable:
    """Numbers of pieces by the hash of their bytes."""

    def __init__(self) -> None:
        self._slots = np.zeros((_SLOTS, 2), np.uint64)  # hash, and number plus 1; or zeros
        self._count = 0

    def add(self, key: np.uint64, number: int) -> None:
        """Note the number of a new piece; beyond MAX_PIECES none is noted."""
        if self._count < MAX_PIECES:
            _add(self._slots, key, number)
            self._count += 1

    def find(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the numbers of pieces (n); -1: is not known."""
        numbers = np.empty(len(keys), np.int64)
        _find(self._slots, keys, numbers)
        return numbers


@kernel
def _add(slots: NDArray[np.uint64], key: np.uint64, number: int) -> None:
    mask = np.uint64(len(slots) - 1)
    slot = key & mask
    while slots[slot, 1]:
        slot = (slot + _ONE) & mask
    slots[slot, 0] = key
    slots[slot, 1] = np.uint64(number + 1)


@kernel
def _find(slots: NDArray[np.uint64], keys: NDArray[np.uint64], numbers: NDArray[np.int64]) -> None:
    mask = np.uint64(len(slots) - 1)
    for i in range(len(keys)):
        slot = keys[i] & mask
        while slots[slot, 1] and slots[slot, 0] != keys[i]:
            slot = (slot + _ONE) & mask
        numbers[i] = np.int64(slots[slot, 1]) - 1


@kernel
def _is_long_space(text: NDArray[np.uint8], at: np.uint64) -> bool:
    """Return whether the character at a place, whose first byte is one of _BEGINS_SPACE, is a space."""
    first = text[at]
    second = text[at + _ONE]
    if first == 0xC2:
        return bool(second == 0x85 or second == 0xA0)
    third = text[at + _TWO]
    if first == 0xE1:
        return bool(second == 0x9A and third == 0x80)
    if first == 0xE3:
        return bool(second == 0x80 and third == 0x80)
    if second == 0x81:
        return bool(third == 0x9F)
    return bool(second == 0x80 and (third <= 0x8A or third == 0xA8 or third == 0xA9 or third == 0xAF))


@kernel
def count_pieces(text: NDArray[np.uint8]) -> int:
    """Return how many pieces a text in UTF-8 has; or a few more, where spaces have several bytes."""
    count = 0
    was_space = True
    for i in range(len(text)):
        kind = _KINDS[text[np.uint64(i)]]
        is_space = kind == _IS_SPACE
        if kind == _BEGINS_SPACE:
            is_space = _is_long_space(text, np.uint64(i))
        count += was_space & ~is_space
        was_space = is_space
    return count


@kernel
def find_pieces(
    text: NDArray[np.uint8], borders: NDArray[np.uint64], keys: NDArray[np.uint64], lines: NDArray[np.int32]
) -> int:
    """Return how many pieces there are (n); write their hashes, where each begins and ends (n, 2), and its line (n).

    Lines end at \\n, and are numbered; those without a piece have no number.
    """
    count = np.uint64(0)
    line = -1
    is_new_line = True
    at = np.uint64(0)
    end = np.uint64(len(text))
    while at < end:
        kind = _KINDS[text[at]]
        if kind == _IS_SPACE:
            is_new_line |= text[at] == _NEWLINE
            at += _ONE
            continue
        if kind == _BEGINS_SPACE and _is_long_space(text, at):
            at += _TWO if text[at] == 0xC2 else _THREE
            continue
        start = at
        key = np.uint64(0)
        eight = np.uint64(0)
        while at < end:
            kind = _KINDS[text[at]]
            if kind and (kind == _IS_SPACE or _is_long_space(text, at)):
                break
            eight = (eight << np.uint64(8)) | np.uint64(text[at])
            at += _ONE
            if (at - start) & _SEVEN == 0:
                key = mix_bytes(key, eight)
                eight = np.uint64(0)
        line += is_new_line
        is_new_line = False
        keys[count] = mix_bytes(mix_bytes(key, eight), at - start)
        borders[count, 0] = start
        borders[count, 1] = at
        lines[count] = line
        count += _ONE
    return int(np.int64(count))


@kernel(inline="always")
def mix_bytes(key: np.uint64, eight: np.uint64) -> np.uint64:
    """Return the hash of what `key` is the hash of and eight more bytes."""
    value = (key ^ eight) * _MULTIPLIER
    return value ^ (value >> _SHIFT)
