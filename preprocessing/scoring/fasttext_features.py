"""Features of texts as fastText finds them: its words, word n-grams and subwords, as rows of a model's vectors.

They are those of src/dictionary.cc in facebookresearch/fastText. Words are taken in groups: one loop finds where they
are, one loads their first 16 bytes, one hashes them, one looks them up. None of these loops has a branch that depends
on the text, so that the processor computes many words at once. What they do not settle, such as longer words, is looked
up one by one.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel, prefetch
from preprocessing.scoring.fasttext_file import PREFIX, FastTextFile
from preprocessing.scoring.fasttext_words import (
    FNV_START,
    SHORT,
    JoinedTexts,
    WordGroup,
    find_words,
    hash_byte,
    hash_bytes,
    hash_words,
    load_words,
)

_NONE = -1  # the number of no entry
_LABEL_ROW = -2  # stands for the row of a label, which is no feature
_END_ROW = -3  # and for that of the word that ends a line
IS_SPACE = np.zeros(256, np.bool_)
IS_SPACE[list(b" \n\r\t\v\f\0")] = True
_LABEL = np.frombuffer(PREFIX.encode(), np.uint8)
_END = np.frombuffer(b"</s>", np.uint8)  # the word that ends a line
_AFTER_ENTRY = 10  # bytes of an entry after its text: a zero byte, its count, its kind
_MULTIPLIER = np.uint64(116049371)  # of the hash of an n-gram
_MIN_BUCKET = 1 << 12  # from which a remainder is found by floating-point numbers
_BEGIN_WORD = np.uint8(ord("<"))  # around a word when its subwords are taken
_END_WORD = np.uint8(ord(">"))
_BUCKET = 4  # numbers of a bucket of the dictionary: the keys of two words, and two values
_VALUE = 2  # place of the first value
_LINE = 64  # bytes of a line of the processor's cache
_NUMBER = np.uint64(0x7FFFFFFF)  # bits of a value that are a word's number plus 1
_HAS_MORE = np.uint64(0x80000000)  # bit of a bucket's first value: some entries of its hashes are elsewhere
_ONE = np.uint64(1)
_KEY_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, of bits that look random
_LABEL_LOW = np.uint64(int.from_bytes(PREFIX.encode()[:8], "little"))
_END_LOW = np.uint64(int.from_bytes(b"</s>", "little"))


class FeatureTable(NamedTuple):
    """Tables of a model by which the features of texts are looked up.

    Words of up to 15 bytes are looked up in `buckets` of 32 bytes, two in a line of the processor's cache: the keys of
    two words, and two values, with a hash in the upper half and a number plus 1 below, or 0. Of a bucket that had no
    room words are in the other one of its line, and it says so by a bit of its first value. If that had none either, or
    a label was in their place, a bit of its second value says so; then, and for longer words, `slots` are looked at, a
    hash table with the values of all entries. Entry i is `content[starts[i] : starts[i + 1]]`; the first
    `words` entries are words. `end_row` is the row of the word that ends a line, -1 without it. The `bucket` rows after
    those of the words are for n-grams and subwords.
    """

    buckets: NDArray[np.uint64]
    slots: NDArray[np.uint64]
    content: NDArray[np.uint8]
    starts: NDArray[np.int64]
    words: int
    end_row: int
    word_ngrams: int
    bucket: int
    min_subword: int
    max_subword: int

    def max_counts(self, size: int) -> tuple[int, int]:
        """Return how many words, and how many features, a text of so many bytes has at most."""
        words = size // 2 + 2  # a word and the space after it, and the word that ends a line
        lengths = max(self.max_subword - self.min_subword + 1, 0) if self.max_subword else 0
        return words, words * max(self.word_ngrams, 1) + 2 * (size + 1) * lengths

    def number_of(self, label: str) -> int:
        """Return the number of the entry of a label."""
        for number in range(self.words, len(self.starts) - 1):
            entry = self.content[self.starts[number] : self.starts[number + 1]].tobytes()
            if entry.decode("utf-8", "replace") == label:
                return number
        raise ValueError(f"expected one of the model's labels, got {label!r}")


def read_features(model: FastTextFile, file: NDArray[np.uint8]) -> tuple[FeatureTable, int]:
    """Return the tables of a model, and where its dictionary ends in its file."""
    starts = np.zeros(model.words + model.label_count + 1, np.int64)
    slots = np.zeros(1 << max(2 * len(starts), 2).bit_length(), np.uint64)
    buckets = _empty_buckets(len(slots) // 2)
    texts, end_row, size = read_dictionary(file[model.dictionary :], model.words, starts, slots, buckets)
    features = FeatureTable(
        buckets,
        slots,
        texts,
        starts,
        model.words,
        end_row,
        model.word_ngrams,
        model.bucket,
        model.min_subword,
        model.max_subword,
    )
    return features, model.dictionary + size


def _empty_buckets(count: int) -> NDArray[np.uint64]:
    """Return buckets that begin with a line of the processor's cache."""
    raw = np.zeros(_BUCKET * count + _LINE // 8, np.uint64)
    skipped = -raw.ctypes.data % _LINE // 8
    return raw[skipped : skipped + _BUCKET * count].reshape(count, _BUCKET)


@kernel
def read_dictionary(
    entries: NDArray[np.uint8],
    words: int,
    starts: NDArray[np.int64],
    slots: NDArray[np.uint64],
    buckets: NDArray[np.uint64],
) -> tuple[NDArray[np.uint8], int, int]:
    """Read the entries of a dictionary into `starts` and both hash tables, of which only zeros are given.

    Return their texts, the row of the word that ends a line, or -1, and the size of all entries in the file. It is one
    kernel, as each takes a process some milliseconds to load.
    """
    size = find_entries(entries, starts)
    texts = np.empty(starts[-1], np.uint8)
    fill_dictionary(entries, starts, words, texts, slots, buckets)
    end_row = find_entry(hash_bytes(_END, 0, len(_END)), _END, 0, len(_END), slots, texts, starts)
    return texts, end_row if end_row < words else _NONE, size


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
def fill_dictionary(
    entries: NDArray[np.uint8],
    starts: NDArray[np.int64],
    words: int,
    texts: NDArray[np.uint8],
    slots: NDArray[np.uint64],
    buckets: NDArray[np.uint64],
) -> None:
    """Copy the texts of all entries, and enter these into both hash tables, frequent words first."""
    mask = np.uint64(len(slots) - 1)
    bucket_mask = np.uint64(len(buckets) - 1)
    for number in range(len(starts) - 1):
        start = starts[number]
        end = starts[number + 1]
        first = start + number * _AFTER_ENTRY
        texts[start:end] = entries[first : first + end - start]
        entry_hash = np.uint64(hash_bytes(texts, start, end))
        value = entry_hash << np.uint64(32) | np.uint64(number + 1)
        slot = entry_hash & mask
        while slots[slot]:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = value
        if end - start >= SHORT:
            continue
        low = np.uint64(0)
        high = np.uint64(0)
        for i in range(end - start):
            byte = np.uint64(texts[start + i]) << np.uint64(8 * (i % 8))
            low |= byte if i < 8 else np.uint64(0)
            high |= byte if i >= 8 else np.uint64(0)
        is_placed = False
        own = entry_hash & bucket_mask
        for bucket in (own, own ^ _ONE):
            for place in range(_VALUE):
                if number < words and not is_placed and not buckets[bucket, _VALUE + place] & _NUMBER:
                    buckets[bucket, place] = key_of_word(low, high)
                    buckets[bucket, _VALUE + place] |= value
                    is_placed = True
            if not is_placed:
                has_more = _VALUE if bucket == own else _VALUE + 1
                buckets[own, has_more] |= _HAS_MORE


@kernel(inline="always")
def key_of_word(low: np.uint64, high: np.uint64) -> np.uint64:
    """Return what is compared of a word besides its hash: its bytes, if it has up to 8, and a hash of more."""
    return low + high * _KEY_MULTIPLIER


@kernel
def find_entry(
    entry_hash: np.uint32,
    text: NDArray[np.uint8],
    start: int,
    end: int,
    slots: NDArray[np.uint64],
    content: NDArray[np.uint8],
    starts: NDArray[np.int64],
) -> int:
    """Return the number of the entry that is `text[start:end]`, whose hash is `entry_hash`; -1 if there is none."""
    mask = np.uint64(len(slots) - 1)
    slot = np.uint64(entry_hash) & mask
    while slots[slot]:
        if slots[slot] >> np.uint64(32) == np.uint64(entry_hash):
            number = (slots[slot] & _NUMBER) - np.uint64(1)
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
    texts: JoinedTexts,
    first: int,
    stop: int,
    model: FeatureTable,
    group: WordGroup,
    hashes: NDArray[np.int32],
    rows: NDArray[np.int32],
) -> int:
    """Write the rows of the features of `content[first:stop]`, which a space follows, to `rows`; return their number.

    They have the order in which fastText adds their vectors: words and subwords, then word n-grams by their first word.
    `hashes` has room for those of all words.
    """
    features = 0
    count = np.uint64(0)  # of words, the one that ends the line included; without a sign, as an index needs no check
    at = int(first)
    begun = _NONE
    is_end = False
    while at <= stop and not is_end:
        words, begun, at = find_words(texts.blocks, at, stop, begun, group.borders)
        load_words(texts.eights, group, words)
        hash_words(group, words)
        are_special = look_up(texts.content, model, group, words)
        if not are_special and not model.max_subword:
            for i in range(words):
                word_row = np.int32(group.values[i])
                rows[np.uint64(features)] = word_row  # without a branch, which would often be mispredicted
                features += int(word_row >= 0)
            for i in range(words):
                hashes[count + np.uint64(i)] = np.int32(group.hashes[i])
            count += np.uint64(words)
            continue
        for i in range(words):
            value = group.values[i]
            row = int(np.int32(value))
            if row == _LABEL_ROW:
                continue
            if row == _END_ROW:
                is_end = True
                break
            rows[np.uint64(features)] = row
            features += row >= 0
            if model.max_subword:
                start = group.borders[0, i]
                features = add_subwords(texts.content, start, group.borders[1, i], model, rows, features)
            hashes[count] = np.int32(group.hashes[i])
            count += np.uint64(1)
    if model.end_row >= 0:
        rows[features] = model.end_row
        features += 1
    hashes[count] = np.int32(hash_bytes(_END, 0, len(_END)))
    pairs = int(np.int64(count))
    if model.word_ngrams == 2 and model.bucket >= _MIN_BUCKET:
        add_pairs(hashes[: pairs + 1], model, rows[features : features + pairs])
        features += pairs
    elif model.word_ngrams > 1:
        features = add_ngrams(hashes, pairs + 1, model, rows, features)
    return features


@kernel
def look_up(text: NDArray[np.uint8], model: FeatureTable, group: WordGroup, count: int) -> bool:
    """Write the row of words, and the hashes of long ones; _LABEL_ROW for labels, _END_ROW for what ends a line.

    Return whether there are any of both.
    """
    buckets = model.buckets
    mask = np.uint64(len(buckets) - 1)
    for i in range(count):
        prefetch(buckets, np.uint64(group.hashes[i]) & mask)
    misses = np.uint64(0)
    for i in range(count):
        low = group.low[i]
        word_hash = np.uint64(group.hashes[i])
        at = word_hash & mask
        key = key_of_word(low, group.high[i])
        first = buckets[at, _VALUE]
        second = buckets[at, _VALUE + 1]
        is_first = (buckets[at, 0] == key) & (first >> np.uint64(32) == word_hash)
        is_second = (buckets[at, 1] == key) & (second >> np.uint64(32) == word_hash)
        number = second if is_second else np.uint64(0)
        number = first if is_first else number
        group.values[i] = (number & _NUMBER) - np.uint64(1)
        group.missing[misses] = i
        is_known = is_first | is_second | (first & _HAS_MORE == np.uint64(0))
        is_settled = is_known & (group.sizes[i] < np.uint32(SHORT)) & (low != _LABEL_LOW) & (low != _END_LOW)
        misses += np.uint64(not is_settled)
    end_hash = hash_bytes(_END, 0, len(_END))
    are_special = False
    for j in range(misses):
        i = group.missing[j]
        if group.sizes[i] < np.uint32(SHORT) and group.low[i] != _LABEL_LOW and group.low[i] != _END_LOW:
            is_settled, group.values[i] = look_beside(buckets, group, i)
            if is_settled:
                continue
        start = group.borders[0, i]
        end = group.borders[1, i]
        if group.sizes[i] > np.uint32(SHORT):
            group.hashes[i] = hash_bytes(text, start, end)
        row = find_entry(group.hashes[i], text, start, end, model.slots, model.content, model.starts)
        if row >= model.words or (row < 0 and is_label(text, start, end)):
            row = _LABEL_ROW
            are_special = True
        # The word that ends a line does so also within a text, which fastText reads no further then.
        elif group.hashes[i] == end_hash and is_end(text, start, end):
            row = _END_ROW
            are_special = True
        group.values[i] = np.uint64(np.uint32(row))
    return are_special


@kernel(inline="always")
def look_beside(buckets: NDArray[np.uint64], group: WordGroup, i: int) -> tuple[bool, np.uint64]:
    """Look a word up in the other bucket of its bucket's line; return whether that settles its row, and the row."""
    word_hash = np.uint64(group.hashes[i])
    own = word_hash & np.uint64(len(buckets) - 1)
    key = key_of_word(group.low[i], group.high[i])
    for place in range(_VALUE):
        value = buckets[own ^ _ONE, _VALUE + place]
        if buckets[own ^ _ONE, place] == key and value >> np.uint64(32) == word_hash:
            return True, (value & _NUMBER) - _ONE
    return buckets[own, _VALUE + 1] & _HAS_MORE == np.uint64(0), np.uint64(0) - _ONE


@kernel
def add_pairs(hashes: NDArray[np.int32], model: FeatureTable, rows: NDArray[np.int32]) -> None:
    """Write the rows of pairs of words to `rows`, for a `bucket` of at least _MIN_BUCKET."""
    bucket = int(model.bucket)
    inverse = 1 / model.bucket
    firsts = hashes[: len(rows)]
    seconds = hashes[1:]
    for i in range(len(rows)):
        joined = np.uint64(np.int64(firsts[i])) * _MULTIPLIER + np.uint64(np.int64(seconds[i]))
        rows[i] = model.words + remainder(joined, bucket, inverse)


@kernel(inline="always")
def remainder(value: np.uint64, divisor: int, inverse: float) -> int:
    """Return `value` modulo a divisor of at least _MIN_BUCKET, whose `inverse` is 1 / divisor.

    It is what the processor's division gives, which takes longer. Of the 64 bits a float64 has 53, so that the first
    quotient is off by 3 at most; the second leaves less than the divisor, or exceeds it by one.
    """
    quotient = np.int64(np.float64(value >> np.uint64(11)) * (inverse * 2048.0))
    rest = np.int64(value - np.uint64(quotient) * np.uint64(divisor))
    rest -= np.int64(np.float64(rest) * inverse) * divisor
    rest += divisor if rest < 0 else 0
    rest -= divisor if rest >= divisor else 0
    return int(rest)


@kernel(error_model="numpy")
def add_ngrams(
    hashes: NDArray[np.int32], count: int, model: FeatureTable, rows: NDArray[np.int32], features: int
) -> int:
    """Add the rows of the word n-grams of `count` words to `features` others; return how many there are."""
    bucket = np.uint64(model.bucket)
    for i in range(count - 1):
        joined = np.uint64(np.int64(hashes[i]))
        for j in range(i + 1, min(i + model.word_ngrams, count)):
            joined = joined * _MULTIPLIER + np.uint64(np.int64(hashes[j]))
            rows[features] = model.words + np.int64(joined % bucket)
            features += 1
    return features


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
    text: NDArray[np.uint8], start: int, end: int, model: FeatureTable, rows: NDArray[np.int32], features: int
) -> int:
    """Add the rows of the subwords of a word, between < and >, to `features` others; return how many there are."""
    for i in range(start - 1, end + 1):
        if start <= i < end and is_continued(text[i]):
            continue
        key = FNV_START
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
