"""Scores of texts by a fastText classifier: fastText's own, several times as fast as by its library.

fastText looks up the vectors of a text's features (words, word n-grams, subwords), takes their mean h, and the softmax
of W h. Here each vector v is multiplied by W once, as the model is read: W h is the mean of the features' W v. With two
labels only the difference of both products counts, so that a feature is one number instead of a hundred, and a model of
800 MB takes 8 MB. Sums are in float64, fastText's in float32: scores differ by the rounding of fastText's.

Features are found as fastText finds them: src/dictionary.cc in facebookresearch/fastText.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill.budget import reserve_memory
from gristmill.errors import wrap_read_errors
from gristmill.kernels import kernel
from preprocessing.scoring.fasttext_file import PREFIX, SHAPE, FastTextFile, read_fasttext

_SOFTMAX = 3
_MAX_LABELS = 16  # with more, the products would take as much memory as the vectors
_MAX_FLOAT32 = 128.0  # products up to this are stored as float32: scores differ by less than 1e-6
_ROWS = 1 << 14  # of the vectors that are multiplied at once
_NONE = -1  # the number of no entry
_IS_SPACE = np.zeros(256, np.bool_)
_IS_SPACE[list(b" \n\r\t\v\f\0")] = True
_LABEL = np.frombuffer(PREFIX.encode(), np.uint8)
_END = np.frombuffer(b"</s>", np.uint8)  # the word that ends a line
_FNV_START = np.uint32(2166136261)
_FNV_PRIME = np.uint32(16777619)
_AFTER_ENTRY = 10  # bytes of an entry after its text: a zero byte, its count, its kind
_MULTIPLIER = np.uint64(116049371)  # of the hash of an n-gram
_BEGIN_WORD = np.uint8(ord("<"))  # around a word when its subwords are taken
_END_WORD = np.uint8(ord(">"))


def can_score(model: FastTextFile) -> bool:
    """Return whether a FastTextScorer scores as this model does: one with a softmax over few labels, not quantized."""
    has_hashes = model.word_ngrams > 1 or model.max_subword > 0
    return (
        model.loss == _SOFTMAX
        and not model.is_quantized
        and model.pruned < 0
        and 2 <= len(model.labels) <= max(2, min(_MAX_LABELS, model.dim))
        and (model.bucket > 0 or not has_hashes)
    )


@dataclass(frozen=True)
class FastTextScorer:
    """A model that scores texts by the probability of one of its labels.

    `products` (rows, n) are the products of the features' vectors with the label's row of W: for two labels the
    difference of both, for more those of all, the label's own first. The dictionary is a hash table of `slots`: the
    hash of an entry in the upper half of the bits, its number plus 1 in the lower, or 0. Entry i is
    `content[starts[i] : starts[i + 1]]`, and the first `words` entries are words.
    `end_row` is the row of the word that ends a line, -1 without it.
    """

    products: NDArray[Any]
    slots: NDArray[np.uint64]
    content: NDArray[np.uint8]
    starts: NDArray[np.int64]
    words: int
    end_row: int
    word_ngrams: int
    bucket: int
    min_subword: int
    max_subword: int

    @classmethod
    def read(cls, path: Path, label: str) -> "FastTextScorer":
        """Read a model that `can_score` allows, and the products with a label's vector."""
        model = read_fasttext(path)
        with wrap_read_errors(path), path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        every = np.frombuffer(content, np.uint8)
        starts = np.zeros(model.words + len(model.labels) + 1, np.int64)
        entries = every[model.dictionary :]
        stop = model.dictionary + find_entries(entries, starts)
        texts = np.empty(starts[-1], np.uint8)
        slots = np.zeros(1 << max(2 * len(starts), 2).bit_length(), np.uint64)
        fill_slots(entries, starts, texts, slots)
        end_row = find_entry(hash_bytes(_END, 0, len(_END)), _END, 0, len(_END), slots, texts, starts)
        vectors, start = _matrix(content, stop)
        outputs, _ = _matrix(content, start)
        return cls(
            _multiply(vectors, outputs, model.labels.index(label)),
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

    def score(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the probability of the label for each text; 0 for one that the model says nothing of."""
        encoded = [text.encode() for text in texts]
        sizes = [len(data) for data in encoded]
        scores = np.empty(len(texts), np.float32)
        max_features = self._max_features(max(sizes, default=0))
        with reserve_memory(2 * sum(sizes) + 4 * max_features, "a document"):
            content = np.frombuffer(b"".join(encoded), np.uint8)
            ends = np.cumsum(sizes, dtype=np.int64)
            rows = np.empty(max_features, np.int32)
            score_texts(
                content, ends, self.products, self.slots, self.content, self.starts, self.words, self.end_row,
                self.word_ngrams, self.bucket, self.min_subword, self.max_subword, rows, scores,
            )  # fmt: skip
        return scores

    def _max_features(self, size: int) -> int:
        """Return how many features a text of so many bytes has at most."""
        words = size // 2 + 2  # a word and the space after it, and the word that ends a line
        lengths = max(self.max_subword - self.min_subword + 1, 0) if self.max_subword else 0
        return words * max(self.word_ngrams, 1) + 2 * (size + 1) * lengths


def _matrix(content: mmap.mmap, start: int) -> tuple[NDArray[np.float32], int]:
    """Return a matrix whose flag for quantization is at `start`, and where it ends."""
    first = start + 1
    rows, columns = SHAPE.unpack_from(content, first)
    values = np.frombuffer(content, "<f4", rows * columns, first + SHAPE.size)
    return values.reshape(rows, columns), first + SHAPE.size + values.nbytes


def _multiply(vectors: NDArray[np.float32], outputs: NDArray[np.float32], label: int) -> NDArray[Any]:
    """Return the products of FastTextScorer."""
    others = np.delete(outputs, label, axis=0)
    weights = np.vstack([outputs[label], others]).astype(np.float64)
    if len(others) == 1:
        weights = weights[:1] - weights[1:]
    products = np.empty((len(vectors), len(weights)), np.float64)
    for start in range(0, len(vectors), _ROWS):
        rows = slice(start, start + _ROWS)
        products[rows] = vectors[rows].astype(np.float64) @ weights.T
    is_small = np.abs(products).max(initial=0) <= _MAX_FLOAT32
    return products.astype(np.float32) if is_small else products


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
                return int(number)
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


@kernel
def score_texts(
    text: NDArray[np.uint8],
    text_ends: NDArray[np.int64],
    products: NDArray[Any],
    slots: NDArray[np.uint64],
    content: NDArray[np.uint8],
    starts: NDArray[np.int64],
    words: int,
    end_row: int,
    word_ngrams: int,
    bucket: int,
    min_subword: int,
    max_subword: int,
    rows: NDArray[np.int32],
    scores: NDArray[np.float32],
) -> None:
    """Write the score of each text; they follow one another in `text`, and end at `text_ends`.

    `rows` has room for the features of the longest one.
    """
    sums = np.empty(products.shape[1], np.float64)
    first = 0
    for number in range(len(text_ends)):
        count = find_features(
            text, first, text_ends[number], slots, content, starts, words, end_row, word_ngrams, bucket, min_subword,
            max_subword, rows,
        )  # fmt: skip
        # All at once, as this waits for memory far less than one at a time.
        add_products(rows, count, products, sums)
        scores[number] = probability(sums, count)
        first = text_ends[number]


@kernel(error_model="numpy")
def find_features(
    text: NDArray[np.uint8],
    first: int,
    stop: int,
    slots: NDArray[np.uint64],
    content: NDArray[np.uint8],
    starts: NDArray[np.int64],
    words: int,
    end_row: int,
    word_ngrams: int,
    bucket: int,
    min_subword: int,
    max_subword: int,
    rows: NDArray[np.int32],
) -> int:
    """Write the rows of the features of `text[first:stop]` to `rows`; return how many there are."""
    end_key = hash_bytes(_END, 0, len(_END))
    begun = np.empty(max(word_ngrams - 2, 1), np.uint64)  # hashes of n-grams of two words and more that go on
    previous = np.uint64(0)  # hash of the previous word
    features = 0
    count = 0  # of words, the one that ends the line included
    at = first
    is_end = False
    while not is_end:
        while at < stop and _IS_SPACE[text[np.uint64(at)]]:
            at += 1
        start = at
        key = _FNV_START
        while at < stop and not _IS_SPACE[text[np.uint64(at)]]:
            key = hash_byte(key, text[np.uint64(at)])
            at += 1
        if start == at:
            row = end_row
            key = end_key
            is_end = True
        else:
            row = find_entry(key, text, start, at, slots, content, starts)
            if row >= words or (row < 0 and is_label(text, start, at)):
                continue
            # The word that ends a line does so also within a text, which fastText reads no further then.
            is_end = key == end_key and is_equal(_END, 0, len(_END), text, start, at)
        if row >= 0:
            rows[features] = row
            features += 1
        if max_subword and not is_end:
            features = add_subwords(text, start, at, min_subword, max_subword, bucket, words, rows, features)
        hashed = np.uint64(np.int64(np.int32(key)))
        if count and word_ngrams > 1:
            joined = previous * _MULTIPLIER + hashed
            rows[features] = words + int(joined % np.uint64(bucket))
            features += 1
            for i in range(min(count - 1, word_ngrams - 2)):
                begun[i] = begun[i] * _MULTIPLIER + hashed
                rows[features] = words + int(begun[i] % np.uint64(bucket))
                features += 1
            if word_ngrams > 2:
                begun[(count - 1) % (word_ngrams - 2)] = joined
        previous = hashed
        count += 1
    return features


@kernel
def add_products(rows: NDArray[np.int32], count: int, products: NDArray[Any], sums: NDArray[np.float64]) -> None:
    """Write the sums of the products of the first `count` rows."""
    for i in range(len(sums)):
        total = 0.0
        for j in range(count):
            total += products[np.uint64(rows[j]), i]
        sums[i] = total


@kernel
def is_label(text: NDArray[np.uint8], start: int, end: int) -> bool:
    """Return whether a word begins as labels do."""
    return end - start >= len(_LABEL) and is_equal(_LABEL, 0, len(_LABEL), text, start, start + len(_LABEL))


@kernel
def add_subwords(
    text: NDArray[np.uint8],
    start: int,
    end: int,
    min_subword: int,
    max_subword: int,
    bucket: int,
    words: int,
    rows: NDArray[np.int32],
    features: int,
) -> int:
    """Add the rows of the subwords of a word, between < and >, to `features` others; return how many there are."""
    for i in range(start - 1, end + 1):
        if start <= i < end and is_continued(text[i]):
            continue
        key = _FNV_START
        length = 0
        j = i
        while j <= end and length < max_subword:
            key = hash_byte(key, byte_of_word(text, start, end, j))
            j += 1
            while j < end and is_continued(text[j]):
                key = hash_byte(key, text[j])
                j += 1
            length += 1
            is_border = length == 1 and (i == start - 1 or j == end + 1)
            if length >= min_subword and not is_border:
                rows[features] = words + int(key) % bucket
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


@kernel
def probability(sums: NDArray[np.float64], features: int) -> np.float32:
    """Return the softmax of the first label, 0 without features; fastText takes a logarithm of it between."""
    if features == 0:
        return np.float32(0)
    others = 0.0
    if len(sums) == 1:
        others = np.exp(-sums[0] / features)
    for i in range(1, len(sums)):
        others += np.exp((sums[i] - sums[0]) / features)
    return np.float32(np.exp(np.log(1 / (1 + others) + 1e-5)))
