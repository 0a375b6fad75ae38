"""Features of texts as fastText finds them: its words, word n-grams and subwords, as rows of a model's vectors.

They are those of src/dictionary.cc in facebookresearch/fastText. Words are taken in groups: one loop finds where they
are, one loads their first 16 bytes, one hashes them, one looks them up. None of these loops has a branch that depends
on the text, so that the processor computes many words at once. What they do not settle, such as longer words, is looked
up one by one.
"""

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel, prefetch
from preprocessing.scoring.fasttext_dictionary import (
    END,
    HAS_MORE,
    NONE,
    NUMBER,
    VALUE,
    FeatureTable,
    find_entry,
    is_equal,
    key_of_word,
    look_beside,
)
from preprocessing.scoring.fasttext_file import PREFIX
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

_LABEL_ROW = -2  # stands for the row of a label, which is no feature
_END_ROW = -3  # and for that of the word that ends a line
IS_SPACE = np.zeros(256, np.bool_)
IS_SPACE[list(b" \n\r\t\v\f\0")] = True
_LABEL = np.frombuffer(PREFIX.encode(), np.uint8)
_MULTIPLIER = np.uint64(116049371)  # of the hash of an n-gram
_MIN_BUCKET = 1 << 12  # from which a remainder is found by floating-point numbers
_BEGIN_WORD = np.uint8(ord("<"))  # around a word when its subwords are taken
_END_WORD = np.uint8(ord(">"))
_LABEL_LOW = np.uint64(int.from_bytes(PREFIX.encode()[:8], "little"))
_END_LOW = np.uint64(int.from_bytes(b"</s>", "little"))


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
    begun = NONE
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
    hashes[count] = np.int32(hash_bytes(END, 0, len(END)))
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
        first = buckets[at, VALUE]
        second = buckets[at, VALUE + 1]
        is_first = (buckets[at, 0] == key) & (first >> np.uint64(32) == word_hash)
        is_second = (buckets[at, 1] == key) & (second >> np.uint64(32) == word_hash)
        number = second if is_second else np.uint64(0)
        number = first if is_first else number
        group.values[i] = (number & NUMBER) - np.uint64(1)
        group.missing[misses] = i
        is_known = is_first | is_second | (first & HAS_MORE == np.uint64(0))
        is_settled = is_known & (group.sizes[i] < np.uint32(SHORT)) & (low != _LABEL_LOW) & (low != _END_LOW)
        misses += np.uint64(not is_settled)
    end_hash = hash_bytes(END, 0, len(END))
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
    return is_equal(END, 0, len(END), text, start, end)


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
