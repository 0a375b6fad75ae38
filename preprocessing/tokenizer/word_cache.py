"""Encodes many texts in one compiled call: splits each into words, and caches the ids of each word.

A text is split between two characters a, b if no piece of the vocabulary contains them in a row. No merge ever
crosses such a place, as the piece that it made would contain a, b. So the words on both sides get the same ids
apart as together. With the usual settings spaces are such places (only the first character of a piece is a
space), and so are most places between letters and punctuation, digits or scripts.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel
from preprocessing.tokenizer.bpe import (
    ASCII,
    MAX_SCAN_BYTES,
    SCRATCH,
    Merges,
    bigram_bit,
    decode,
    merge_by_heap,
    merge_by_scan,
)

MARGIN = 8  # bytes after the last text, and ids after its last, that may be read or written over
_LONGEST, _MOST_IDS = 24, 8  # bytes and ids of a word that is cached
_SIZES, _IDS = 3, 8  # column of WordCache.rows with the sizes; column of WordCache.ids with the first id
_CUT = 1 << 14  # bytes that are cut into words together
_COUNT = np.uint64(0xFFFFFFFF)  # mask of the number of ids
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


class WordCache(NamedTuple):
    """Words and their ids, in a hash table whose rows are lines of the processor's cache.

    A word's hash decides in which two rows it may be; the one used last is in the first of them.
    """

    rows: NDArray[np.uint64]  # (rows, 8): the word's UTF-8 in 3, its bytes << 32 | ids (0: free), its ids in 4
    ids: NDArray[np.int32]  # (rows, 16): the same memory
    scratch: NDArray[np.int32]  # for merge_by_scan


def new_word_cache(size: int) -> WordCache:
    """An empty cache of between size / 2 and `size` bytes, plus 2 KiB."""
    rows = np.zeros((1 << max(1, (size // 64).bit_length() - 1), 8), np.uint64)
    return WordCache(rows, rows.view(np.int32), np.zeros(SCRATCH, np.int32))


@kernel
def encode_texts(
    data: NDArray[np.uint8], eights: NDArray[np.uint64], starts: NDArray[np.int64], merges: Merges, cache: WordCache,
    end_id: int, ids: NDArray[np.int32], offsets: NDArray[np.int64],
) -> None:  # fmt: skip
    """Encode texts: writes their ids to `ids`, each text followed by `end_id` unless that is negative.

    Text i is the UTF-8 bytes starts[i] … starts[i + 1] of `data`, in which MARGIN bytes follow the last; eights[i] is
    the 8 bytes from i on. Its ids begin at offsets[i] (texts + 1 offsets). `ids` needs room for one id per byte and
    per text, two more per space if the space is no piece, and MARGIN.
    """
    rows, cached_ids, unknown = cache.rows, cache.ids, merges.unknown
    n = np.int64(0)
    ends = np.empty(_CUT, np.int32)
    for text in range(len(starts) - 1):
        offsets[text] = first = n
        at, stop = starts[text], starts[text + 1]
        while at < stop:
            for word in range(_cut(data, at, stop, merges.ascii_bigrams, merges.bigram_filter, ends)):
                end = np.int64(ends[word])
                size = end - at
                if size > MAX_SCAN_BYTES:
                    n = merge_by_heap(data, at, end, merges, ids, n, first)
                elif size > _LONGEST:
                    count = merge_by_scan(data, at, end, merges, cache.scratch)
                    n = _append(cache.scratch, count, ids, n, first, unknown)
                else:
                    row = _find_row(rows, eights, at, size)
                    if row < 0:
                        count = merge_by_scan(data, at, end, merges, cache.scratch)
                        n = _append(cache.scratch, count, ids, n, first, unknown)
                        _store(cache, ~row, eights, at, size, count)
                    elif cached_ids[row, _IDS] == unknown:
                        count = np.int64(rows[row, _SIZES] & _COUNT)
                        n = _append(cached_ids[row, _IDS:], count, ids, n, first, unknown)
                    else:
                        for i in range(_MOST_IDS):  # all, as a copy of a fixed size is faster
                            ids[n + i] = cached_ids[row, _IDS + i]
                        n += np.int64(rows[row, _SIZES] & _COUNT)
                at = end
        if end_id >= 0:
            ids[n] = end_id
            n += 1
    offsets[len(starts) - 1] = n


@kernel
def _cut(data, at, stop, ascii_bigrams, bigram_filter, ends):  # type: ignore[no-untyped-def]
    """Write the ends of the first words in the bytes at … stop to `ends`; return how many words they are.

    They are those of len(ends) bytes, at least one, without the last if it goes on. What depends on the text is added
    rather than branched on: a processor could not foresee where a word ends.
    """
    n = 0
    character, at = decode(data, at)
    while n == 0 and at < stop:
        limit = min(stop, at + len(ends) - 1)
        while at < limit:
            following = np.int64(data[at])
            ends[n] = at
            if character | following < ASCII:
                n += not ascii_bigrams[character * ASCII + following]
                at += 1
            else:
                following, at = decode(data, at)
                bit = bigram_bit(character, following)
                n += not (bigram_filter[bit >> 3] >> (bit & 7)) & 1
            character = following
    if at >= stop:
        ends[n] = stop
        n += 1
    return n


@kernel(inline="always")
def _find_row(rows, eights, at, size):  # type: ignore[no-untyped-def]
    """Row of a word; if it is in none, ~row of the first where it may be."""
    used, hashed = (size + 7) >> 3, np.uint64(size)
    for i in range(used):
        hashed = (hashed ^ _eight(eights, at, size, i)) * _MULTIPLIER
        hashed ^= hashed >> np.uint64(32)
    first = np.int64(hashed & np.uint64(len(rows) - 2))
    for row in range(first, first + 2):
        if rows[row, _SIZES] >> np.uint64(32) == np.uint64(size):
            i = 0
            while i < used and rows[row, i] == _eight(eights, at, size, i):
                i += 1
            if i == used:
                if row > first:
                    for j in range(8):
                        rows[first, j], rows[row, j] = rows[row, j], rows[first, j]
                return first
    return ~first


@kernel(inline="always")
def _eight(eights, at, size, i):  # type: ignore[no-untyped-def]
    """Bytes 8 i to 8 i + 7 of a word of `size` bytes, zeros after its end."""
    found, left = eights[at + 8 * i], size - 8 * i
    return found if left >= 8 else found & (_ALL >> np.uint64(64 - 8 * left))


@kernel
def _store(cache, row, eights, at, size, count):  # type: ignore[no-untyped-def]
    """Store a word and its `count` ids (in scratch), unless they are too many; the word of the second row goes."""
    rows = cache.rows
    if count > _MOST_IDS:
        return
    for j in range(8):
        rows[row + 1, j] = rows[row, j]
    for i in range((size + 7) >> 3):
        rows[row, i] = _eight(eights, at, size, i)
    rows[row, _SIZES] = np.uint64(size) << np.uint64(32) | np.uint64(count)
    for i in range(count):
        cache.ids[row, _IDS + i] = cache.scratch[i]


@kernel(inline="always")
def _append(source, count, ids, n, first, unknown):  # type: ignore[no-untyped-def]
    """Append a word's ids to those of its text, ids[first:n], merging unknown pieces in a row; return the new n."""
    skipped = np.int64(count > 0 and n > first and source[0] == unknown and ids[n - 1] == unknown)
    for i in range(skipped, count):
        ids[n + i - skipped] = source[i]
    return n + count - skipped
