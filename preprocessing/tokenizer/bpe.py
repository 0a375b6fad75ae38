"""Byte-pair encoding of many texts in one compiled call: splits each into words, and caches the ids of each word.

A text is split between two characters a, b if no piece of the vocabulary contains them in a row. No merge ever
crosses such a place, as the piece that it made would contain a, b. So the words on both sides get the same ids
apart as together. With the usual settings spaces are such places (only the first character of a piece is a
space), and so are most places between letters and punctuation, digits or scripts.

A word starts as its characters. Of all adjacent pairs of symbols whose concatenation is a piece, the pair whose
piece has the highest score is merged, the leftmost of equal scores, until no pair makes a piece (Sennrich et al.
2016, arXiv:1508.07909; scores and tie-breaking as in SentencePiece). A character that is not in the vocabulary
becomes its UTF-8 bytes, or the unknown piece, once for a run of such characters.

A symbol is the id of a piece, or -1 - c for a character c (a code point) that is no piece. Inner functions take
single arrays rather than a Merges, as passing a tuple of arrays costs more than the look-up itself.
"""

import heapq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel

ASCII = 128  # number of ASCII characters
BIGRAM_FILTER_BITS = 22  # log2 of the filter's bits
MAX_SCAN_BYTES = 64  # a longer word is merged with a heap
SCRATCH = 6 * MAX_SCAN_BYTES  # for merge_by_scan: ids, up to 3 a character, its symbols, and the merges of its pairs
_SPACE = 32
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, for multiplicative hashing
_SECOND_MULTIPLIER = np.uint64(0xC2B2AE3D27D4EB4F)  # odd numbers of random bits, as XXH64 has
_THIRD_MULTIPLIER = np.uint64(0x165667B19E3779F9)
_LOW = np.uint64(0xFFFFFFFF)  # mask of the low 32 bits
_EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)  # key of a free slot of the hash table
_NO_RANK = np.int32(0x7FFFFFFF)
MARGIN = 24  # bytes after the last text, and ids after its last, that may be read or written over
_LONGEST = 24  # bytes of a word that is cached
_MAX_IDS = 8  # ids of a word that is cached
_SIZES = 3  # column of WordCache.rows with the sizes
_IDS = 8  # column of WordCache.ids with the first id
_CUT = 1 << 12  # bytes that are cut into words together: the ends of these words stay in the L1 cache
_COUNT = np.uint64(0xFFFFFFFF)  # mask of the number of ids
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


class Merges(NamedTuple):
    """A BPE vocabulary as tables for the compiled functions."""

    symbols: NDArray[np.int32]  # [code point]: its symbol
    ascii_bigrams: NDArray[np.bool_]  # [128 · a + b]: whether some piece contains the ASCII characters a, b in a row
    bigram_filter: NDArray[np.uint8]  # Bloom filter (one hash) of all character bigrams of pieces
    pairs: NDArray[np.uint64]  # hash table, open addressing, (n, 2): a packed pair of symbols, or _EMPTY; its merge
    byte_ids: NDArray[np.int32]  # [byte]: its piece; empty for a model without byte fallback
    unknown: int  # id of the unknown piece


def merge_table(pairs: list[tuple[int, int]], pieces: list[int], scores: NDArray[np.float32]) -> NDArray[np.uint64]:
    """`pairs` of Merges, given pairs of symbols, the id of the piece that each makes, and the scores of all pieces.

    A merge is the rank of the piece << 32 | its id; the rank is 0 for the highest score, equal for equal scores.
    """
    table = np.full((1 << (2 * len(pairs) + 2).bit_length(), 2), _EMPTY, np.uint64)
    if pairs:
        ranks = np.unique(-scores, return_inverse=True)[1].astype(np.uint64)
        merges = ranks[pieces] << np.uint64(32) | np.array(pieces, np.uint64)
        _insert_all(table, np.array(pairs, np.int64), merges)
    return table


@kernel
def bigram_tables(pairs: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
    """`ascii_bigrams` and `bigram_filter` of Merges, given all bigrams of pieces: code points, (n, 2)."""
    ascii_bigrams = np.zeros(ASCII * ASCII, np.bool_)
    bigram_filter = np.zeros(1 << (BIGRAM_FILTER_BITS - 3), np.uint8)
    for i in range(len(pairs)):
        a, b = pairs[i]
        if a < ASCII and b < ASCII:
            ascii_bigrams[a * ASCII + b] = True
        bit = bigram_bit(a, b)
        bigram_filter[bit >> 3] |= np.uint8(1 << (bit & 7))
    return ascii_bigrams, bigram_filter


class WordCache(NamedTuple):
    """Words and their ids, in a hash table whose rows are lines of the processor's cache.

    A word's hash decides in which two rows it may be; the one used last is in the first of them.
    """

    rows: NDArray[np.uint64]  # (rows, 8): the word's UTF-8 in 3, its bytes << 32 | ids (0: free), its ids in 4
    ids: NDArray[np.int32]  # (rows, 16): the same memory
    scratch: NDArray[np.int32]  # for merge_by_scan


def new_word_cache(size: int) -> WordCache:
    """Return an empty cache of between size / 2 and `size` bytes, plus 2 KiB."""
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
    rows = cache.rows
    cached_ids = cache.ids
    unknown = merges.unknown
    n = np.int64(0)
    ends = np.empty(_CUT, np.int32)
    for text in range(len(starts) - 1):
        offsets[text] = first = n
        at = starts[text]
        stop = starts[text + 1]
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
                    first_eight = eights[at] & _mask(size)
                    second_eight = eights[at + 8] & _mask(size - 8)
                    third_eight = eights[at + 16] & _mask(size - 16)
                    row = _find_row(rows, first_eight, second_eight, third_eight, size)
                    if row < 0:
                        count = merge_by_scan(data, at, end, merges, cache.scratch)
                        n = _append(cache.scratch, count, ids, n, first, unknown)
                        _store(cache, ~row, first_eight, second_eight, third_eight, size, count)
                    elif cached_ids[row, _IDS] == unknown:
                        count = np.int64(rows[row, _SIZES] & _COUNT)
                        n = _append(cached_ids[row, _IDS:], count, ids, n, first, unknown)
                    else:
                        for i in range(_MAX_IDS):  # all, as a copy of a fixed size is faster
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

    They are those of len(ends) bytes, at least one, without the last if it continues. What depends on the text is added
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
def _mask(size):  # type: ignore[no-untyped-def]
    """Return the mask of the first `size` bytes of eight: of none for less than 0, of all for more than 8."""
    half = np.uint64(32 - 4 * min(max(size, 0), 8))  # bits; a shift by 64, of no bytes, would be undefined
    return (_ALL >> half) >> half


@kernel(inline="always")
def _find_row(rows, first_eight, second_eight, third_eight, size):  # type: ignore[no-untyped-def]
    """Return the row of a word, given its bytes with zeros after their end; if in none, ~row of the first it may be in.

    All bytes are hashed and compared, whatever the size: a processor could not foresee how many there are.
    """
    hashed = (first_eight * _MULTIPLIER) ^ (second_eight * _SECOND_MULTIPLIER) ^ (third_eight * _THIRD_MULTIPLIER)
    hashed ^= np.uint64(size) * _SECOND_MULTIPLIER
    hashed ^= hashed >> np.uint64(29)
    hashed *= _MULTIPLIER
    hashed ^= hashed >> np.uint64(32)
    row = np.int64(hashed & np.uint64(len(rows) - 2))
    if _is_in_row(rows, row, first_eight, second_eight, third_eight, size):
        return row
    if _is_in_row(rows, row + 1, first_eight, second_eight, third_eight, size):
        for j in range(8):
            rows[row, j], rows[row + 1, j] = rows[row + 1, j], rows[row, j]
        return row
    return ~row


@kernel(inline="always")
def _is_in_row(rows, row, first_eight, second_eight, third_eight, size):  # type: ignore[no-untyped-def]
    """Return whether a row has this word."""
    first_differs = rows[row, 0] ^ first_eight
    second_differs = rows[row, 1] ^ second_eight
    third_differs = rows[row, 2] ^ third_eight
    size_differs = (rows[row, _SIZES] >> np.uint64(32)) ^ np.uint64(size)
    return (first_differs | second_differs | third_differs | size_differs) == 0


@kernel
def _store(cache, row, first_eight, second_eight, third_eight, size, count):  # type: ignore[no-untyped-def]
    """Store a word and its `count` ids (in scratch), unless they are too many; the word of the second row goes."""
    rows = cache.rows
    if count > _MAX_IDS:
        return
    for j in range(8):
        rows[row + 1, j] = rows[row, j]
    rows[row, 0] = first_eight
    rows[row, 1] = second_eight
    rows[row, 2] = third_eight
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


@kernel
def merge_by_scan(data, at, end, merges, scratch):  # type: ignore[no-untyped-def]
    """Merge a word, bytes at … end, by scanning all pairs for the best one each time.

    Writes its ids to the front of `scratch` (int32, SCRATCH), and returns their number.
    """
    symbols = scratch[3 * MAX_SCAN_BYTES :]
    pieces = scratch[4 * MAX_SCAN_BYTES :]
    ranks = scratch[5 * MAX_SCAN_BYTES :]
    n = 0
    pairs = merges.pairs
    while at < end:
        character, at = decode(data, at)
        symbols[n] = merges.symbols[character]
        n += 1
    for i in range(n - 1):
        ranks[i], pieces[i] = _merge_of(symbols[i], symbols[i + 1], pairs)
    while True:
        best = -1
        rank = _NO_RANK
        for i in range(n - 1):
            if ranks[i] < rank:
                best = i
                rank = ranks[i]
        if best < 0:
            break
        symbols[best] = pieces[best]
        n -= 1
        for i in range(best + 1, n):
            symbols[i], ranks[i - 1], pieces[i - 1] = symbols[i + 1], ranks[i], pieces[i]
        if best > 0:
            ranks[best - 1], pieces[best - 1] = _merge_of(symbols[best - 1], symbols[best], pairs)
        if best + 1 < n:
            ranks[best], pieces[best] = _merge_of(symbols[best], symbols[best + 1], pairs)
    count = 0
    for i in range(n):
        count = _append_symbol(scratch, count, 0, symbols[i], merges)
    return count


@kernel
def merge_by_heap(data, at, end, merges, ids, n, first):  # type: ignore[no-untyped-def]
    """Merge a long word, bytes at … end, with a heap of pairs; append its ids to `ids` and return the new n."""
    symbols = np.empty(end - at, np.int32)
    size = 0
    while at < end:
        character, at = decode(data, at)
        symbols[size] = merges.symbols[character]
        size += 1
    before = np.arange(-1, size - 1, 1, np.int32)
    after = np.arange(1, size + 1, 1, np.int32)
    alive = np.ones(size, np.bool_)
    heap = [(np.int32(0), np.int32(0), np.int32(0), np.int32(0), np.int32(0)) for i in range(0)]
    for i in range(size - 1):
        _push_pair(heap, symbols, np.int32(i), np.int32(i + 1), merges.pairs)
    while heap:
        _, i, j, left, right = heapq.heappop(heap)
        if not (alive[i] and alive[j] and symbols[i] == left and symbols[j] == right):
            continue
        symbols[i] = _merge_of(left, right, merges.pairs)[1]
        alive[j], after[i] = False, after[j]
        if before[i] >= 0:
            _push_pair(heap, symbols, before[i], i, merges.pairs)
        if after[i] < size:
            before[after[i]] = i
            _push_pair(heap, symbols, i, after[i], merges.pairs)
    for i in range(size):
        if alive[i]:
            n = _append_symbol(ids, n, first, symbols[i], merges)
    return n


@kernel
def _push_pair(heap, symbols, i, j, pairs):  # type: ignore[no-untyped-def]
    """Push the pair of symbols i, j if they make a piece; the lowest rank is popped first, then the leftmost."""
    rank, _ = _merge_of(symbols[i], symbols[j], pairs)
    if rank != _NO_RANK:
        heapq.heappush(heap, (rank, i, j, symbols[i], symbols[j]))


@kernel(inline="always")
def _merge_of(left, right, pairs):  # type: ignore[no-untyped-def]
    """(rank, id) of the piece that two symbols make; _NO_RANK if they make none."""
    key = _pack_pair(left, right)
    mask = len(pairs) - 1
    slot = _first_slot(key, mask)
    while pairs[slot, 0] != key and pairs[slot, 0] != _EMPTY:
        slot = (slot + 1) & mask
    merge = pairs[slot, 1]  # of an empty slot: all ones
    return np.int32((merge >> np.uint64(32)) & np.uint64(_NO_RANK)), np.int32(merge & np.uint64(_NO_RANK))


@kernel
def _insert_all(table, pairs, merges):  # type: ignore[no-untyped-def]
    mask = len(table) - 1
    for i in range(len(pairs)):
        key = _pack_pair(pairs[i, 0], pairs[i, 1])
        slot = _first_slot(key, mask)
        while table[slot, 0] != _EMPTY:
            slot = (slot + 1) & mask
        table[slot, 0], table[slot, 1] = key, merges[i]


@kernel
def _pack_pair(left, right):  # type: ignore[no-untyped-def]
    return ((np.uint64(left) & _LOW) << np.uint64(32)) | (np.uint64(right) & _LOW)


@kernel
def _first_slot(key, mask):  # type: ignore[no-untyped-def]
    return np.int64((key * _MULTIPLIER) >> np.uint64(32)) & mask


@kernel
def bigram_bit(a, b):  # type: ignore[no-untyped-def]
    """Number of the bigram filter's bit for two code points."""
    key = (np.uint64(a) << np.uint64(21)) | np.uint64(b)
    return np.int64((key * _MULTIPLIER) >> np.uint64(64 - BIGRAM_FILTER_BITS))


@kernel
def _append_symbol(ids, n, first, symbol, merges):  # type: ignore[no-untyped-def]
    if symbol < 0:
        return append_unknown(ids, n, first, -1 - symbol, merges)
    ids[n] = symbol
    return n + 1


@kernel
def append_unknown(ids, n, first, character, merges):  # type: ignore[no-untyped-def]
    """Append a code point that is no piece: its bytes, or the unknown piece unless the text so far ends in it."""
    if len(merges.byte_ids) == 0:
        if n > first and ids[n - 1] == merges.unknown:
            return n
        ids[n] = merges.unknown
        return n + 1
    character = 0x2581 if character == _SPACE else character
    size = 1 + (character >= 0x80) + (character >= 0x800) + (character >= 0x10000)
    for i in range(size):
        lead = 0 if size == 1 else 0xF00 >> size & 0xFF  # 110…, 1110…, 11110…
        byte = (character >> 6 * (size - 1 - i)) & 0x3F | 0x80
        if i == 0:
            byte = lead | (character >> 6 * (size - 1))
        ids[n + i] = merges.byte_ids[byte]
    return n + size


@kernel
def decode(data, at):  # type: ignore[no-untyped-def]
    """(code point, end) of the character at byte `at` of valid UTF-8."""
    lead = np.int64(data[at])
    if lead < 0x80:
        return lead, at + 1
    second = np.int64(data[at + 1]) & 0x3F
    if lead < 0xE0:
        return (lead & 0x1F) << 6 | second, at + 2
    third = np.int64(data[at + 2]) & 0x3F
    if lead < 0xF0:
        return (lead & 0x0F) << 12 | second << 6 | third, at + 3
    return (lead & 0x07) << 18 | second << 12 | third << 6 | np.int64(data[at + 3]) & 0x3F, at + 4
