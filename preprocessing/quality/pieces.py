"""Pieces of a text: what is between its spaces, found by kernels in UTF-8, and looked up among those known by number.

Spaces are those of Python's `str.split`. A sign of _SIGNS behind a word of ASCII letters is a piece of its own, so that
fewer pieces are to be known. A piece is known by a 64-bit hash of its bytes.
"""

import string
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel

UNKNOWN = -1  # in place of the number of a piece that is to be learnt
WORD = -2  # and for that of a piece that is one word of ASCII letters, of which nothing else is to be known
_SLOTS = 1 << 20  # of the table of known pieces, a power of two: 16 MiB
MAX_PIECES = _SLOTS // 2  # that are known, so that a search is short
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, of bits that look random
_SHIFT = np.uint64(29)
_NEWLINE = np.uint8(ord("\n"))
_ONE = np.uint64(1)
_TWO = np.uint64(2)
_THREE = np.uint64(3)
_EIGHT = np.uint64(8)  # bytes that are hashed at once
# Kinds of the first byte of a character: 0 of one that is no space.
_IS_SPACE = 1
_BEGINS_SPACE = 2  # of some of the characters that begin so
_KINDS = np.zeros(256, np.uint8)
_KINDS[[9, 10, 11, 12, 13, 28, 29, 30, 31, 32]] = _IS_SPACE
_KINDS[[0xC2, 0xE1, 0xE2, 0xE3]] = _BEGINS_SPACE
_STOP = np.uint8(ord("."))
_SIGNS = np.zeros(256, np.bool_)
_SIGNS[list(b',;:?!)]".')] = True
_MIN_LONG = np.uint64(8)  # letters: so long is no abbreviation, of which a full stop would be part
_LOWER = np.uint8(0x20)  # the bit in which a small letter of ASCII differs from its capital
_SMALL_A = np.uint8(ord("a"))
_LETTERS = np.zeros(256, np.bool_)
_LETTERS[list(string.ascii_letters.encode())] = True


class PieceTable:
    """Numbers of pieces by the hash of their bytes.

    `special` are words of less than eight small ASCII letters that are to be learnt; other words of ASCII letters need
    not be.
    """

    def __init__(self, special: Sequence[str] = ()) -> None:
        self._slots = np.zeros((_SLOTS, 2), np.uint64)  # hash, and number plus 1; or zeros
        self._count = 0
        self._special = hash_words(sorted(special))

    def add(self, keys: NDArray[np.uint64], numbers: NDArray[np.int64]) -> None:
        """Note the numbers of new pieces (n), some of which are the same piece; beyond MAX_PIECES none is noted."""
        self._count = _add(self._slots, keys, numbers, self._count, MAX_PIECES)

    def find(self, text: NDArray[np.uint8], borders: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the numbers of pieces of a text (n), which begin and end at `borders` (n, 2): or UNKNOWN, or WORD."""
        numbers = np.empty(len(keys), np.int64)
        _find(self._slots, text, borders, keys, self._special, numbers)
        return numbers


def hash_words(words: Sequence[str]) -> NDArray[np.uint64]:
    """Return the 64-bit hashes of words (n)."""
    encoded = [word.encode("utf-8", "surrogatepass") for word in words]
    ends = np.cumsum([len(word) for word in encoded], dtype=np.uint64)
    hashes = np.empty(len(words), np.uint64)
    _hash_all(np.frombuffer(b"".join(encoded), np.uint8), ends, hashes)
    return hashes


@kernel
def _hash_all(text: NDArray[np.uint8], ends: NDArray[np.uint64], hashes: NDArray[np.uint64]) -> None:
    start = np.uint64(0)
    for i in range(len(ends)):
        hashes[i] = hash_bytes(text, start, ends[i])
        start = ends[i]


@kernel
def hash_bytes(text: NDArray[np.uint8], start: np.uint64, end: np.uint64) -> np.uint64:
    """Return the 64-bit hash of some bytes."""
    key = np.uint64(0)
    eight = np.uint64(0)
    count = np.uint64(0)
    for at in range(start, end):
        eight = (eight << np.uint64(8)) | np.uint64(text[at])
        count += _ONE
        if count == _EIGHT:
            key = _mix(key, eight)
            eight = np.uint64(0)
            count = np.uint64(0)
    return _mix(_mix(key, eight), end - start)


@kernel(inline="always")
def _mix(key: np.uint64, eight: np.uint64) -> np.uint64:
    """Return the hash of what `key` is the hash of and eight more bytes."""
    value = (key ^ eight) * _MULTIPLIER
    return value ^ (value >> _SHIFT)


@kernel
def slot_of(slots: NDArray[np.uint64], key: np.uint64) -> np.uint64:
    """Return the slot of a hash in a table of hashes and numbers (n, 2): a free one, of number 0, if it has it not."""
    mask = np.uint64(len(slots) - 1)
    slot = key & mask
    while slots[slot, 1] and slots[slot, 0] != key:
        slot = (slot + _ONE) & mask
    return slot


@kernel
def _add(
    slots: NDArray[np.uint64], keys: NDArray[np.uint64], numbers: NDArray[np.int64], count: int, max_count: int
) -> int:
    """Add pieces that are not in a table that has `count`; return how many it has then."""
    for i in range(len(keys)):
        if count >= max_count:
            break
        slot = slot_of(slots, keys[i])
        count += slots[slot, 1] == 0
        slots[slot, 0] = keys[i]
        slots[slot, 1] = np.uint64(numbers[i] + 1)
    return count


@kernel
def _find(
    slots: NDArray[np.uint64],
    text: NDArray[np.uint8],
    borders: NDArray[np.uint64],
    keys: NDArray[np.uint64],
    special: NDArray[np.uint64],
    numbers: NDArray[np.int64],
) -> None:
    for i in range(len(keys)):
        slot = slot_of(slots, keys[i])
        numbers[i] = np.int64(slots[slot, 1]) - 1  # UNKNOWN if there is none
        if slots[slot, 1] == 0 and _is_word(text, borders[i, 0], borders[i, 1]):
            is_special = _is_special(text, borders[i, 0], borders[i, 1], special)
            numbers[i] = UNKNOWN if is_special else WORD


@kernel
def _is_word(text: NDArray[np.uint8], start: np.uint64, end: np.uint64) -> bool:
    """Return whether some bytes are ASCII letters."""
    for at in range(start, end):  # noqa: SIM110 (numba compiles no generators)
        if not _LETTERS[text[at]]:
            return False
    return True


@kernel
def _is_special(text: NDArray[np.uint8], start: np.uint64, end: np.uint64, special: NDArray[np.uint64]) -> bool:
    """Return whether a word of ASCII letters has, in small letters, one of the hashes of short words."""
    if end - start >= _EIGHT:
        return False
    eight = np.uint64(0)
    for at in range(start, end):
        eight = (eight << np.uint64(8)) | np.uint64(text[at] | _LOWER)
    key = _mix(_mix(np.uint64(0), eight), end - start)
    for other in special:  # noqa: SIM110 (numba compiles no generators)
        if key == other:
            return True
    return False


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
    """Return how many pieces a text in UTF-8 has; or more, where spaces have several bytes or signs end pieces."""
    count = 0
    was_space = True
    was_sign = False
    for i in range(len(text)):
        byte = text[np.uint64(i)]
        kind = _KINDS[byte]
        is_space = kind == _IS_SPACE
        if kind == _BEGINS_SPACE:
            is_space = _is_long_space(text, np.uint64(i))
        count += was_space & ~is_space
        count += was_sign & is_space
        was_space = is_space
        was_sign = _SIGNS[byte]
    return count + was_sign


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
        while at < end and not (_KINDS[text[at]] and (_KINDS[text[at]] == _IS_SPACE or _is_long_space(text, at))):
            at += _ONE
        line += is_new_line
        is_new_line = False
        stop = at
        if _ends_in_sign(text, start, at):
            stop = at - _ONE
        keys[count] = hash_bytes(text, start, stop)
        borders[count, 0] = start
        borders[count, 1] = stop
        lines[count] = line
        count += _ONE
        if stop < at:
            keys[count] = hash_bytes(text, stop, at)
            borders[count, 0] = stop
            borders[count, 1] = at
            lines[count] = line
            count += _ONE
    return int(np.int64(count))


@kernel
def _ends_in_sign(text: NDArray[np.uint8], start: np.uint64, end: np.uint64) -> bool:
    """Return whether a piece is ASCII letters and a sign that is a word of its own behind them."""
    last = end - _ONE
    if not _SIGNS[text[last]] or last == start or not _is_word(text, start, last):
        return False
    if text[last] == _STOP:
        return bool(last - start >= _MIN_LONG and text[last - _ONE] >= _SMALL_A)
    return True
