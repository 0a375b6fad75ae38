"""The dictionary of a fastText model, as tables in which the words of texts are looked up."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel
from preprocessing.scoring.fasttext_file import FastTextFile
from preprocessing.scoring.fasttext_words import SHORT, WordGroup, hash_bytes

NONE = -1  # the number of no entry
END = np.frombuffer(b"</s>", np.uint8)  # the word that ends a line
VALUE = 2  # place of a bucket's first value
NUMBER = np.uint64(0x7FFFFFFF)  # bits of a value that are a word's number plus 1
HAS_MORE = np.uint64(0x80000000)  # bit of a bucket's first value: some entries of its hashes are elsewhere
_AFTER_ENTRY = 10  # bytes of an entry after its text: a zero byte, its count, its kind
_BUCKET = 4  # numbers of a bucket: the keys of two words, and two values
_LINE = 64  # bytes of a line of the processor's cache
_ONE = np.uint64(1)
_KEY_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, of bits that look random


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
    end_row = find_entry(hash_bytes(END, 0, len(END)), END, 0, len(END), slots, texts, starts)
    return texts, end_row if end_row < words else NONE, size


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
            for column in range(VALUE):
                if number < words and not is_placed and not buckets[bucket, VALUE + column] & NUMBER:
                    buckets[bucket, column] = key_of_word(low, high)
                    buckets[bucket, VALUE + column] |= value
                    is_placed = True
            if not is_placed:
                has_more = VALUE if bucket == own else VALUE + 1
                buckets[own, has_more] |= HAS_MORE


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
            number = (slots[slot] & NUMBER) - np.uint64(1)
            if is_equal(content, starts[number], starts[number + np.uint64(1)], text, start, end):
                return int(np.int64(number))
        slot = (slot + np.uint64(1)) & mask
    return NONE


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


@kernel(inline="always")
def look_beside(buckets: NDArray[np.uint64], group: WordGroup, i: int) -> tuple[bool, np.uint64]:
    """Look a word up in the other bucket of its bucket's line; return whether that settles its row, and the row."""
    word_hash = np.uint64(group.hashes[i])
    own = word_hash & np.uint64(len(buckets) - 1)
    key = key_of_word(group.low[i], group.high[i])
    for place in range(VALUE):
        value = buckets[own ^ _ONE, VALUE + place]
        if buckets[own ^ _ONE, place] == key and value >> np.uint64(32) == word_hash:
            return True, (value & NUMBER) - _ONE
    return buckets[own, VALUE + 1] & HAS_MORE == np.uint64(0), np.uint64(0) - _ONE
