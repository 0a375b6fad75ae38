"""Features of texts as fastText finds them: its words, word n-grams and subwords, as rows of a model's vectors.

They are those of src/dictionary.cc in facebookresearch/fastText. Words are taken in groups: one loop finds where they
are, one loads their first 16 bytes, one hashes them, one looks them up. None of these loops has a branch that depends
on the text, so that the processor computes many words at once. What they do not settle, such as longer words, is looked
up one by one.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel
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
_SLOT = 4  # numbers of a slot
_VALUE = 2  # place in a slot of hash and number
_LINE = 64  # bytes of a line of the processor's cache
_NUMBER = np.uint64(0xFFFFFFFF)  # the lower half of a slot
_LABEL_LOW = np.uint64(int.from_bytes(PREFIX.encode()[:8], "little"))
_END_LOW = np.uint64(int.from_bytes(b"</s>", "little"))


class FeatureTable(NamedTuple):
    """Tables of a model by which the features of texts are looked up.

    The dictionary is a hash table of `slots` of 32 bytes, so that none lies in two lines of the processor's cache: the
    first 16 bytes of an entry as two numbers, and one with its hash in the upper half and its number plus 1 in the
    lower, or 0. Entry i is `content[starts[i] : starts[i + 1]]`; the first `words` entries are words. `end_row` is the
    row of the word that ends a line, -1 without it. The `bucket` rows after those of the words are for n-grams and
    subwords.
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
    entries = file[model.dictionary :]
    starts = np.zeros(model.words + model.label_count + 1, np.int64)
    stop = model.dictionary + find_entries(entries, starts)
    texts = np.empty(starts[-1], np.uint8)
    slots = _empty_slots(1 << max(2 * len(starts), 2).bit_length())
    fill_slots(entries, starts, texts, slots)
    end_row = find_entry(hash_bytes(_END, 0, len(_END)), _END, 0, len(_END), slots, texts, starts)
    features = FeatureTable(
        slots,
        texts,
        starts,
        model.words,
        end_row if end_row < model.words else _NONE,
        model.word_ngrams,
        model.bucket,
        model.min_subword,
        model.max_subword,
    )
    return features, stop


def _empty_slots(count: int) -> NDArray[np.uint64]:
    """Return slots that begin with a line of the processor's cache."""
    raw = np.zeros(_SLOT * count + _LINE // 8, np.uint64)
    skipped = -raw.ctypes.data % _LINE // 8
    return raw[skipped : skipped + _SLOT * count].reshape(count, _SLOT)


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
    entries: NDArray[np.uint8],
    starts: NDArray[np.int64],
    texts: NDArray[np.uint8],
    slots: NDArray[np.uint64],
) -> None:
    """Copy the texts of all entries and their first bytes, and enter these into a hash table."""
    mask = np.uint64(len(slots) - 1)
    for number in range(len(starts) - 1):
        start = starts[number]
        end = starts[number + 1]
        first = start + number * _AFTER_ENTRY
        texts[start:end] = entries[first : first + end - start]
        key = np.uint64(hash_bytes(texts, start, end))
        slot = key & mask
        while slots[slot, _VALUE]:
            slot = (slot + np.uint64(1)) & mask
        for i in range(min(end - start, SHORT)):
            slots[slot, i // 8] |= np.uint64(texts[start + i]) << np.uint64(8 * (i % 8))
        slots[slot, _VALUE] = key << np.uint64(32) | np.uint64(number + 1)


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
    while slots[slot, _VALUE]:
        if slots[slot, _VALUE] >> np.uint64(32) == np.uint64(key):
            number = (slots[slot, _VALUE] & _NUMBER) - np.uint64(1)
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
        look_up(texts.content, model, group, words)
        for i in range(words):
            value = group.values[i]
            row = int(np.int32(value))
            if row < _NONE:
                if row == _LABEL_ROW:
                    continue
                is_end = True
                break
            rows[np.uint64(features)] = row  # without a branch, which would often be mispredicted
            features += row >= 0
            if model.max_subword:
                start = group.borders[0, i]
                features = add_subwords(texts.content, start, group.borders[1, i], model, rows, features)
            hashes[count] = np.int32(value >> np.uint64(32))
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
def look_up(text: NDArray[np.uint8], model: FeatureTable, group: WordGroup, count: int) -> None:
    """Write the hash and the row of words; _LABEL_ROW for labels, _END_ROW for what ends a line."""
    slots = model.slots
    mask = np.uint64(len(slots) - 1)
    end_number = np.uint64(model.end_row)  # of no entry, if it is -1
    for i in range(count):  # a loop that does nothing else waits for many lines of the cache at a time
        group.values[i] = slots[np.uint64(group.hashes[i]) & mask, _VALUE]
    misses = np.uint64(0)
    for i in range(count):
        low = group.low[i]
        key = np.uint64(group.hashes[i])
        first = group.values[i]
        is_first = first >> np.uint64(32) == key
        at = (key + np.uint64(not is_first)) & mask
        slot = slots[at, _VALUE]
        number = (slot & _NUMBER) - np.uint64(1)
        is_free = (first == np.uint64(0)) | (slot == np.uint64(0))
        is_same = (slots[at, 0] == low) & (slots[at, 1] == group.high[i]) & (not is_free)
        is_word = is_same & (number < np.uint64(model.words)) & (number != end_number)
        is_unknown = is_free & (low != _LABEL_LOW) & (low != _END_LOW)
        row = number if is_word else _NUMBER
        group.values[i] = key << np.uint64(32) | row
        group.missing[misses] = i
        is_settled = (is_word | is_unknown) & (group.sizes[i] < np.uint32(SHORT))
        misses += np.uint64(not is_settled)
    end_key = hash_bytes(_END, 0, len(_END))
    for j in range(misses):
        i = group.missing[j]
        start = group.borders[0, i]
        end = group.borders[1, i]
        word_key = group.hashes[i] if group.sizes[i] <= np.uint32(SHORT) else hash_bytes(text, start, end)
        row_found = find_entry(word_key, text, start, end, slots, model.content, model.starts)
        if row_found >= model.words or (row_found < 0 and is_label(text, start, end)):
            row_found = _LABEL_ROW
        # The word that ends a line does so also within a text, which fastText reads no further then.
        elif word_key == end_key and is_end(text, start, end):
            row_found = _END_ROW
        group.values[i] = np.uint64(word_key) << np.uint64(32) | np.uint64(np.uint32(row_found))


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
