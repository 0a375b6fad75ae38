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
    Merges,
    append_unknown,
    bigram_bit,
    decode,
    merge_by_heap,
    merge_by_scan,
)

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio
_HASH, _TEXT, _IDS, _SIZES = range(4)  # columns of WordCache.rows
_USED_ROWS, _USED_TEXT, _USED_IDS = range(3)  # indices of WordCache.used


class WordCache(NamedTuple):
    """Words and their ids, in a hash table with open addressing; emptied when it is full."""

    rows: NDArray[np.uint32]  # (rows, 4): hash (0: free), start in `text`, start in `ids`, bytes << 16 | ids
    text: NDArray[np.uint8]  # UTF-8 of all cached words
    ids: NDArray[np.int32]  # ids of all cached words
    used: NDArray[np.int64]  # (3,): rows, bytes of `text` and `ids` in use
    scratch: NDArray[np.int32]  # for merge_by_scan


def new_word_cache(size: int) -> WordCache:
    """An empty cache of between size / 2 and `size` bytes, plus 3 KiB."""
    rows = 1 << max(5, (size // 32).bit_length() - 1)  # 16 bytes each, at most half in use; 16 more for text and ids
    return WordCache(
        np.zeros((rows, 4), np.uint32), np.zeros(rows * 8, np.uint8), np.zeros(rows * 2, np.int32),
        np.zeros(3, np.int64), np.zeros(5 * MAX_SCAN_BYTES, np.int32),
    )  # fmt: skip


@kernel
def encode_texts(
    data: NDArray[np.uint8], starts: NDArray[np.int64], merges: Merges, cache: WordCache, end_id: int,
    ids: NDArray[np.int32], offsets: NDArray[np.int64],
) -> None:  # fmt: skip
    """Encode texts: writes their ids to `ids`, each text followed by `end_id` unless that is negative.

    Text i is the UTF-8 bytes starts[i] … starts[i + 1] of `data`; its ids begin at offsets[i] (texts + 1
    offsets). `ids` needs room for one id per byte and per text, and two more per space if the space is no piece.
    """
    n, bigrams, bigram_filter = 0, merges.ascii_bigrams, merges.bigram_filter
    for text in range(len(starts) - 1):
        offsets[text] = first = n
        at, stop = starts[text], starts[text + 1]
        while at < stop:
            end, first_char, first_end, word_hash = _next_word(data, at, stop, bigrams, bigram_filter)
            if end == first_end and merges.symbols[first_char] >= 0:
                ids[n] = merges.symbols[first_char]
                n += 1
            elif end == first_end:
                n = append_unknown(ids, n, first, first_char, merges)
            elif end - at > MAX_SCAN_BYTES:
                n = merge_by_heap(data, at, end, merges, ids, n, first)
            else:
                row = _find_row(cache.rows, cache.text, data, at, end - at, word_hash)
                if cache.rows[row, _HASH]:
                    start, count = cache.rows[row, _IDS], cache.rows[row, _SIZES] & 0xFFFF
                    n = _append(cache.ids, np.int64(start), np.int64(count), ids, n, first, merges.unknown)
                else:
                    count = merge_by_scan(data, at, end, merges, cache.scratch)
                    n = _append(cache.scratch, 0, count, ids, n, first, merges.unknown)
                    _store(cache, row, word_hash, data, at, end - at, count)
            at = end
        if end_id >= 0:
            ids[n] = end_id
            n += 1
    offsets[len(starts) - 1] = n


@kernel(inline="always")
def _next_word(data, at, stop, ascii_bigrams, bigram_filter):  # type: ignore[no-untyped-def]
    """(end, first character, end of the first character, hash) of the word that begins at byte `at`."""
    character, first_end = decode(data, at)
    first, at, word_hash = character, first_end, np.uint64(character + 1) * _MULTIPLIER
    while at < stop:
        following = np.int64(data[at])
        if character | following < ASCII:
            if not ascii_bigrams[character * ASCII + following]:
                break
            at += 1
        else:
            following, after = decode(data, at)
            bit = bigram_bit(character, following)
            if not (bigram_filter[bit >> 3] >> (bit & 7)) & 1:
                break
            at = after
        character = following
        word_hash = (word_hash ^ np.uint64(character)) * _MULTIPLIER
    return at, first, first_end, word_hash


@kernel(inline="always")
def _find_row(rows, text, data, at, size, word_hash):  # type: ignore[no-untyped-def]
    """Row of a word of `size` bytes, or the free row to store it in."""
    short, mask = _hash32(word_hash), len(rows) - 1
    row = np.int64(word_hash >> np.uint64(36)) & mask
    while rows[row, _HASH] != 0:
        if rows[row, _HASH] == short and rows[row, _SIZES] >> 16 == size:
            start, i = np.int64(rows[row, _TEXT]), 0
            while i < size and text[start + i] == data[at + i]:
                i += 1
            if i == size:
                break
        row = (row + 1) & mask
    return row


@kernel
def _hash32(word_hash):  # type: ignore[no-untyped-def]
    """The 32 bits of a word's hash that are stored; never 0, which marks a free row."""
    return np.uint32(word_hash >> np.uint64(32)) | np.uint32(1)


@kernel
def _store(cache, row, word_hash, data, at, size, count):  # type: ignore[no-untyped-def]
    """Store a word and its `count` ids (in scratch) in a free row; if there is no room, empty the cache instead."""
    used = cache.used
    full = used[_USED_ROWS] * 2 >= len(cache.rows)
    if full or used[_USED_TEXT] + size > len(cache.text) or used[_USED_IDS] + count > len(cache.ids):
        cache.rows[:] = 0
        used[:] = 0
        return
    cache.rows[row, _HASH], cache.rows[row, _SIZES] = _hash32(word_hash), (size << 16) | count
    cache.rows[row, _TEXT], cache.rows[row, _IDS] = used[_USED_TEXT], used[_USED_IDS]
    for i in range(size):
        cache.text[used[_USED_TEXT] + i] = data[at + i]
    for i in range(count):
        cache.ids[used[_USED_IDS] + i] = cache.scratch[i]
    used[_USED_ROWS] += 1
    used[_USED_TEXT] += size
    used[_USED_IDS] += count


@kernel(inline="always")
def _append(source, at, count, ids, n, first, unknown):  # type: ignore[no-untyped-def]
    """Append a word's ids to those of its text, ids[first:n], merging unknown pieces in a row; return the new n."""
    if count and n > first and source[at] == unknown and ids[n - 1] == unknown:
        at, count = at + 1, count - 1
    for i in range(count):
        ids[n + i] = source[at + i]
    return n + count
