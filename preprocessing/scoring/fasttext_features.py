"""Features of texts as fastText finds them: its words, word n-grams and subwords, as rows of a model's vectors.

They are those of src/dictionary.cc in facebookresearch/fastText. A word is looked up once in a small cache, by its
bytes; only words that are not in it are hashed, and searched for in the dictionary.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel
from preprocessing.scoring.fasttext_file import PREFIX, FastTextFile

MARGIN = 16  # bytes behind the space behind the last text, for what reads eight at once
_NONE = -1  # the number of no entry
_LABEL_ROW = -2  # stands for the row of a label, which is no feature
_END_ROW = -3  # and for that of the word that ends a line
_EIGHT = 8  # bytes that are read at once
_TOGETHER = 512  # words that are looked up together
IS_SPACE = np.zeros(256, np.bool_)
IS_SPACE[list(b" \n\r\t\v\f\0")] = True
_LABEL = np.frombuffer(PREFIX.encode(), np.uint8)
_END = np.frombuffer(b"</s>", np.uint8)  # the word that ends a line
_FNV_START = np.uint32(2166136261)
_FNV_PRIME = np.uint32(16777619)
_AFTER_ENTRY = 10  # bytes of an entry after its text: a zero byte, its count, its kind
_MULTIPLIER = np.uint64(116049371)  # of the hash of an n-gram
_BEGIN_WORD = np.uint8(ord("<"))  # around a word when its subwords are taken
_END_WORD = np.uint8(ord(">"))
_CACHE_BITS = 16  # words in the cache, a power of two: 2 MiB
_CACHE_SHIFT = np.uint64(64 - _CACHE_BITS)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # odd, of bits that look random
# Of eight bytes at once:
_ONES = np.uint64(0x0101010101010101)
_SEVEN_BITS = np.uint64(0x7F7F7F7F7F7F7F7F)
_HIGH_BITS = np.uint64(0x8080808080808080)
_SPACES = np.uint64(0x2020202020202020)
_FROM_TAB = np.uint64(0x7777777777777777)  # added to a byte, it sets the high bit from 9, a tab, on
_ABOVE_RETURN = np.uint64(0x7272727272727272)  # from 14 on, the byte after a carriage return


class Features(NamedTuple):
    """What finds the features of texts for a model.

    The dictionary is a hash table of `slots`: the hash of an entry in the upper half of the bits, its number plus 1 in
    the lower, or 0. Entry i is `content[starts[i] : starts[i + 1]]`, and the first `words` entries are words. `end_row`
    is the row of the word that ends a line, -1 without it. The `bucket` rows after those of the words are for n-grams
    and subwords. `cache` has words of less than 16 bytes: bytes 1 to 8, 9 to 16, hash and row; it is written to.
    """

    slots: NDArray[np.uint64]
    content: NDArray[np.uint8]
    starts: NDArray[np.int64]
    words: int
    end_row: int
    word_ngrams: int
    bucket: int
    min_subword: int
    max_subword: int
    cache: NDArray[np.uint64]

    def max_counts(self, size: int) -> tuple[int, int]:
        """Return how many words, and how many features, a text of so many bytes has at most."""
        words = size // 2 + 2  # a word and the space after it, and the word that ends a line
        lengths = max(self.max_subword - self.min_subword + 1, 0) if self.max_subword else 0
        return words, words * max(self.word_ngrams, 1) + 2 * (size + 1) * lengths


def read_features(model: FastTextFile, file: NDArray[np.uint8]) -> tuple[Features, int]:
    """Return what finds the features of a model, and where its dictionary ends in its file."""
    starts = np.zeros(model.words + len(model.labels) + 1, np.int64)
    entries = file[model.dictionary :]
    stop = model.dictionary + find_entries(entries, starts)
    texts = np.empty(starts[-1], np.uint8)
    slots = np.zeros(1 << max(2 * len(starts), 2).bit_length(), np.uint64)
    fill_slots(entries, starts, texts, slots)
    end_row = find_entry(hash_bytes(_END, 0, len(_END)), _END, 0, len(_END), slots, texts, starts)
    features = Features(
        slots,
        texts,
        starts,
        model.words,
        end_row if end_row < model.words else _NONE,
        model.word_ngrams,
        model.bucket,
        model.min_subword,
        model.max_subword,
        np.zeros((1 << _CACHE_BITS, 4), np.uint64),
    )
    return features, stop


@kernel
def find_entries(entries: NDArray[np.uint8], starts: NDArray[np.int64]) -> int:
    """Write where the text of each entry of a dictionary begins, if they follow one another; return where it ends."""
    at = 0
    for number in range(len(starts) - 1):
        first = at
        while entries[at]:
            at += 1
        starts[number + 1] = starts[number] + at - first
        at += _AFTER_ENTRY
    return at


@kernel
def fill_slots(
    entries: NDArray[np.uint8], starts: NDArray[np.int64], texts: NDArray[np.uint8], slots: NDArray[np.uint64]
) -> None:
    """Copy the texts of all entries, and enter these into a hash table."""
    mask = np.uint64(len(slots) - 1)
    for number in range(len(starts) - 1):
        start = starts[number]
        end = starts[number + 1]
        first = start + number * _AFTER_ENTRY
        texts[start:end] = entries[first : first + end - start]
        key = np.uint64(hash_bytes(texts, start, end))
        slot = key & mask
        while slots[slot]:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = key << np.uint64(32) | np.uint64(number + 1)


@kernel
def hash_bytes(content: NDArray[np.uint8], start: int, end: int) -> np.uint32:
    """Return fastText's hash, FNV-1a over signed bytes."""
    value = _FNV_START
    for i in range(start, end):
        value = hash_byte(value, content[np.uint64(i)])
    return value


@kernel(inline="always")
def hash_byte(value: np.uint32, byte: np.uint8) -> np.uint32:
    """Return the hash of what `value` is the hash of and another byte."""
    return np.uint32((value ^ np.uint32(np.int8(byte))) * _FNV_PRIME)


@kernel
def find_entry(
    key: np.uint32,
    text: NDArray[np.uint8],
    start: int,
    end: int,
    slots: NDArray[np.uint64],
    content: NDArray[np.uint8],
    starts: NDArray[np.int64],
) -> int:
    """Return the number of the entry that is `text[start:end]`, whose hash is `key`; -1 if there is none."""
    mask = np.uint64(len(slots) - 1)
    slot = np.uint64(key) & mask
    while slots[slot]:
        if slots[slot] >> np.uint64(32) == np.uint64(key):
            number = (slots[slot] & np.uint64(0xFFFFFFFF)) - np.uint64(1)
            if is_equal(content, starts[number], starts[number + np.uint64(1)], text, start, end):
                return int(np.int64(number))
        slot = (slot + np.uint64(1)) & mask
    return _NONE


@kernel
def is_equal(content: NDArray[np.uint8], start: int, end: int, text: NDArray[np.uint8], first: int, last: int) -> bool:
    """Return whether two byte strings are equal."""
    if end - start != last - first:
        return False
    at = np.uint64(start)
    for i in range(np.uint64(first), np.uint64(last)):
        if content[at] != text[i]:
            return False
        at += np.uint64(1)
    return True


@kernel(error_model="numpy")
def find_features(
    text: NDArray[np.uint8],
    eights: NDArray[np.uint64],
    first: int,
    stop: int,
    model: Features,
    hashes: NDArray[np.int32],
    rows: NDArray[np.int32],
) -> int:
    """Write the rows of the features of `text[first:stop]`, which a space follows, to `rows`; return their number.

    They have the order in which fastText adds their vectors: words and subwords, then word n-grams by their first word.
    `hashes` has room for those of all words. Many are looked up at a time, as these loads wait for memory together.
    """
    end_key = hash_bytes(_END, 0, len(_END))
    borders = np.empty((_TOGETHER, 2), np.int64)  # where each word begins and ends
    eight = np.empty((_TOGETHER, 2), np.uint64)  # bytes 1 to 8 and 9 to 16 of each word
    values = np.empty(_TOGETHER, np.uint64)  # hash and row of each word
    features = 0
    count = 0  # of words, the one that ends the line included
    at = int(first)
    is_end = False
    while at < stop and not is_end:
        together, at = find_words(text, eights, at, stop, borders, eight)
        look_up(text, borders, eight, together, model, values)
        for i in range(together):
            row = int(np.int32(values[i]))
            if row == _LABEL_ROW:
                continue
            if row == _END_ROW:
                is_end = True
                break
            rows[features] = row  # without a branch, which would often be mispredicted
            features += row >= 0
            if model.max_subword:
                features = add_subwords(text, borders[i, 0], borders[i, 1], model, rows, features)
            hashes[count] = np.int32(values[i] >> np.uint64(32))
            count += 1
    if model.end_row >= 0:
        rows[features] = model.end_row
        features += 1
    hashes[count] = np.int32(end_key)
    count += 1
    if model.word_ngrams < 2:
        return features
    words = model.words
    bucket = np.uint64(model.bucket)
    for i in range(count - 1):
        joined = np.uint64(np.int64(hashes[i]))
        for j in range(i + 1, min(i + model.word_ngrams, count)):
            joined = joined * _MULTIPLIER + np.uint64(np.int64(hashes[j]))
            rows[features] = words + np.int64(joined % bucket)
            features += 1
    return features


@kernel
def find_words(
    text: NDArray[np.uint8],
    eights: NDArray[np.uint64],
    first: int,
    stop: int,
    borders: NDArray[np.int64],
    eight: NDArray[np.uint64],
) -> tuple[int, int]:
    """Write where the next words from `first` on are, _TOGETHER at most; return how many, and where to go on."""
    count = np.uint64(0)
    at = np.uint64(first)
    end = np.uint64(stop)
    while at < end and count < np.uint64(_TOGETHER):
        start = at
        low, size = bytes_of_word(eights[at])
        at += size
        high = np.uint64(0)
        if size == np.uint64(8):
            high, high_size = bytes_of_word(eights[at])
            at += high_size
            if high_size == np.uint64(8):
                while not IS_SPACE[text[at]]:
                    at += np.uint64(1)
        borders[count, 0] = start
        borders[count, 1] = at
        eight[count, 0] = low
        eight[count, 1] = high
        count += np.uint64(size > np.uint64(0))  # no word is between two spaces
        at += np.uint64(1)
    return int(np.int64(count)), int(np.int64(at))


@kernel
def look_up(
    text: NDArray[np.uint8],
    borders: NDArray[np.int64],
    eight: NDArray[np.uint64],
    count: int,
    model: Features,
    values: NDArray[np.uint64],
) -> None:
    """Write the hash and the row of the first `count` words; _LABEL_ROW for labels, _END_ROW for what ends a line."""
    cache = model.cache
    missing = np.empty(_TOGETHER, np.int64)
    misses = 0
    for i in range(count):
        slot = slot_of(eight[i, 0], eight[i, 1])
        values[i] = cache[slot, 2]
        missing[misses] = i
        misses += (cache[slot, 0] != eight[i, 0]) | (cache[slot, 1] != eight[i, 1])
    end_key = hash_bytes(_END, 0, len(_END))
    for j in range(misses):
        i = missing[j]
        start = borders[i, 0]
        end = borders[i, 1]
        key = hash_bytes(text, start, end)
        row = find_entry(key, text, start, end, model.slots, model.content, model.starts)
        if row >= model.words or (row < 0 and is_label(text, start, end)):
            row = _LABEL_ROW
        # The word that ends a line does so also within a text, which fastText reads no further then.
        elif key == end_key and is_end(text, start, end):
            row = _END_ROW
        values[i] = np.uint64(key) << np.uint64(32) | np.uint64(np.uint32(row))
        if end - start < 2 * _EIGHT:  # a longer word would be taken for another one
            slot = slot_of(eight[i, 0], eight[i, 1])
            cache[slot, 0] = eight[i, 0]
            cache[slot, 1] = eight[i, 1]
            cache[slot, 2] = values[i]


@kernel(inline="always")
def slot_of(low: np.uint64, high: np.uint64) -> np.uint64:
    """Return where the cache has a word of these bytes."""
    return ((low ^ (high * _SPREAD)) * _SPREAD) >> _CACHE_SHIFT


@kernel(inline="always")
def bytes_of_word(eight: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Return the bytes before the first space among eight, the others being 0, and how many there are."""
    seven_bits = eight & _SEVEN_BITS
    from_tab = seven_bits + _FROM_TAB  # its high bits are set where a byte is 9 or more, as to the others
    above_return = seven_bits + _ABOVE_RETURN
    is_other = ((seven_bits ^ _SPACES) + _SEVEN_BITS) & (seven_bits + _SEVEN_BITS)
    spaces = ((from_tab & ~above_return) | ~is_other) & ~eight & _HIGH_BITS
    mask = ((spaces & (np.uint64(0) - spaces)) >> np.uint64(7)) - np.uint64(1)
    size = ((mask & _ONES) * _ONES) >> np.uint64(56)
    return eight & mask, size


@kernel
def is_label(text: NDArray[np.uint8], start: int, end: int) -> bool:
    """Return whether a word begins as labels do."""
    return end - start >= len(_LABEL) and is_equal(_LABEL, 0, len(_LABEL), text, start, start + len(_LABEL))


@kernel
def is_end(text: NDArray[np.uint8], start: int, end: int) -> bool:
    """Return whether a word is the one that ends a line."""
    return is_equal(_END, 0, len(_END), text, start, end)


@kernel
def add_subwords(
    text: NDArray[np.uint8], start: int, end: int, model: Features, rows: NDArray[np.int32], features: int
) -> int:
    """Add the rows of the subwords of a word, between < and >, to `features` others; return how many there are."""
    for i in range(start - 1, end + 1):
        if start <= i < end and is_continued(text[i]):
            continue
        key = _FNV_START
        length = 0
        j = i
        while j <= end and length < model.max_subword:
            key = hash_byte(key, byte_of_word(text, start, end, j))
            j += 1
            while j < end and is_continued(text[j]):
                key = hash_byte(key, text[j])
                j += 1
            length += 1
            is_border = length == 1 and (i == start - 1 or j == end + 1)
            if length >= model.min_subword and not is_border:
                rows[features] = model.words + int(key) % model.bucket
                features += 1
    return features


@kernel
def byte_of_word(text: NDArray[np.uint8], start: int, end: int, at: int) -> np.uint8:
    """Return a byte of `text[start:end]`, or of what stands around it."""
    if at < start:
        return _BEGIN_WORD
    return _END_WORD if at == end else text[at]


@kernel
def is_continued(byte: np.uint8) -> bool:
    """Return whether a byte continues a character of UTF-8."""
    return (byte & 0xC0) == 0x80
