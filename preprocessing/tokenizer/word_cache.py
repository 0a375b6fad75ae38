"""Many texts encoded in one compiled call: each is cut, and what lies between two cuts is merged once and remembered.

Where character b follows character a and no piece of the vocabulary holds a directly before b, no merge
ever joins the two, for what it made would be a piece that holds them. What lies left of such a place and
what lies right of it become the same ids together or apart, so a text may be cut there. Spaces are such
places with the usual settings (a piece has one at its beginning only), and so are most others
between letters and punctuation, digits, scripts, or characters that the vocabulary hardly knows.
"""

from typing import NamedTuple

import numba as nb
import numpy as np
from numpy.typing import NDArray

from preprocessing.tokenizer.bpe import ASCII, LONGEST, Merges, append_unknown, decode, encode_long, joint, merge_short

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_HASH, _TEXT, _IDS, _SIZES = range(4)  # columns of Memory.rows
_USED_ROWS, _USED_TEXT, _USED_IDS = range(3)  # of Memory.used


class Memory(NamedTuple):
    """Texts encoded before. Full, it is emptied; it changes no id."""

    rows: NDArray[np.uint32]  # open addressing: hash (0: free), starts in text and in ids, both lengths
    text: NDArray[np.uint8]
    ids: NDArray[np.int32]
    used: NDArray[np.int64]
    scratch: NDArray[np.int32]


def new_memory(size: int) -> Memory:
    """A memory of `size` bytes, or as few as half of that, and 3 KiB."""
    rows = 1 << max(
        5, (size // 32).bit_length() - 1
    )  # 16 bytes a row, of which half are used; as many for text and ids
    return Memory(
        np.zeros((rows, 4), np.uint32), np.zeros(rows * 8, np.uint8), np.zeros(rows * 2, np.int32),
        np.zeros(3, np.int64), np.zeros(5 * LONGEST, np.int32),
    )  # fmt: skip


@nb.njit(cache=True, nogil=True)
def encode_all(
    data: NDArray[np.uint8], starts: NDArray[np.int64], merges: Merges, memory: Memory, end: int,
    ids: NDArray[np.int32], offsets: NDArray[np.int64],
) -> None:  # fmt: skip
    """Write the ids of every text (UTF-8, text i from starts[i] to starts[i + 1]), each followed by `end` unless < 0.

    `offsets` (texts + 1) gets where each begins in `ids`, which must be long enough for one id a byte,
    one a text, and two more a space that is no piece.
    """
    n = 0
    for text in range(len(starts) - 1):
        offsets[text] = first = n
        at, stop = starts[text], starts[text + 1]
        while at < stop:
            cut, character, first_end, value = _next_cut(data, at, stop, merges.ascii_joints, merges.joints)
            if cut == first_end and merges.symbols[character] >= 0:
                ids[n] = merges.symbols[character]
                n += 1
            elif cut == first_end:
                n = append_unknown(ids, n, first, character, merges)
            elif cut - at > LONGEST:
                n = encode_long(data, at, cut, merges, ids, n, first)
            else:
                row = _find(memory.rows, memory.text, data, at, cut - at, value)
                if memory.rows[row, _HASH]:
                    start, count = memory.rows[row, _IDS], memory.rows[row, _SIZES] & 0xFFFF
                    n = _append(memory.ids, np.int64(start), np.int64(count), ids, n, first, merges.unknown)
                else:
                    count = merge_short(data, at, cut, merges, memory.scratch)
                    n = _append(memory.scratch, 0, count, ids, n, first, merges.unknown)
                    _remember(memory, row, value, data, at, cut - at, count)
            at = cut
        if end >= 0:
            ids[n] = end
            n += 1
    offsets[len(starts) - 1] = n


@nb.njit(cache=True, nogil=True, inline="always")
def _next_cut(data, at, stop, ascii_joints, joints):  # type: ignore[no-untyped-def]
    """Where the text from `at` can be cut, its first character and where that ends, and a hash of all."""
    character, first_end = decode(data, at)
    first, at, value = character, first_end, np.uint64(character + 1) * _MULTIPLIER
    while at < stop:
        following = np.int64(data[at])
        if character | following < ASCII:
            if not ascii_joints[character * ASCII + following]:
                break
            at += 1
        else:
            following, after = decode(data, at)
            bit = joint(character, following)
            if not (joints[bit >> 3] >> (bit & 7)) & 1:
                break
            at = after
        character = following
        value = (value ^ np.uint64(character)) * _MULTIPLIER
    return at, first, first_end, value


@nb.njit(cache=True, nogil=True, inline="always")
def _find(rows, text, data, at, size, value):  # type: ignore[no-untyped-def]
    """The row of a text, or the free one where it belongs."""
    short, mask = _short(value), len(rows) - 1
    row = np.int64(value >> np.uint64(36)) & mask
    while rows[row, _HASH] != 0:
        if rows[row, _HASH] == short and rows[row, _SIZES] >> 16 == size:
            start, i = np.int64(rows[row, _TEXT]), 0
            while i < size and text[start + i] == data[at + i]:
                i += 1
            if i == size:
                break
        row = (row + 1) & mask
    return row


@nb.njit(cache=True, nogil=True)
def _short(value):  # type: ignore[no-untyped-def]
    return np.uint32(value >> np.uint64(32)) | np.uint32(1)


@nb.njit(cache=True, nogil=True)
def _remember(memory, row, value, data, at, size, count):  # type: ignore[no-untyped-def]
    """Put a text and its ids (in scratch) in the free row; empty the memory instead if they would fill it."""
    used = memory.used
    full = used[_USED_ROWS] * 2 >= len(memory.rows)
    if full or used[_USED_TEXT] + size > len(memory.text) or used[_USED_IDS] + count > len(memory.ids):
        memory.rows[:] = 0
        used[:] = 0
        return
    memory.rows[row, _HASH], memory.rows[row, _SIZES] = _short(value), (size << 16) | count
    memory.rows[row, _TEXT], memory.rows[row, _IDS] = used[_USED_TEXT], used[_USED_IDS]
    for i in range(size):
        memory.text[used[_USED_TEXT] + i] = data[at + i]
    for i in range(count):
        memory.ids[used[_USED_IDS] + i] = memory.scratch[i]
    used[_USED_ROWS] += 1
    used[_USED_TEXT] += size
    used[_USED_IDS] += count


@nb.njit(cache=True, nogil=True, inline="always")
def _append(source, at, count, ids, n, first, unknown):  # type: ignore[no-untyped-def]
    """Append remembered ids; an unknown after an unknown of the same text, from `first` on, is one with it."""
    if count and n > first and source[at] == unknown and ids[n - 1] == unknown:
        at, count = at + 1, count - 1
    for i in range(count):
        ids[n + i] = source[at + i]
    return n + count
