"""Training of a fastText classifier (Joulin et al. 2016, arXiv:1607.01759), which is saved as fastText saves one.

A text's features are its words of the vocabulary and its word n-grams, hashed into buckets; each has a vector. The mean
of the vectors, h, gives the scores W h of the labels, whose softmax is compared with the label of the text. Training is
plain SGD on one thread, in a fixed order, with a rate that falls to 0: the same texts and seed give the same bytes.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel
from gristmill.storage.local import atomic_write
from preprocessing.scoring.fasttext_file import DICTIONARY, HEADER, MAGIC, PREFIX, SHAPE, VERSION

END = b"</s>"  # the word that ends a line
_SPACES = bytes.maketrans(b"\n\t\v\f\r\0", b" " * 6)
_SUPERVISED = 3
_SOFTMAX = 3
_FNV_START = 2166136261
_FNV_PRIME = 16777619
_MULTIPLIER = np.uint64(116049371)  # of the hash of an n-gram
_ROWS = 1 << 16  # of the vectors that are drawn at once


@dataclass(frozen=True)
class TrainingOptions:
    """Size of a model, and how it is trained: as fastText's dim, wordNgrams, bucket, minCount, epoch and lr."""

    dim: int = 100
    word_ngrams: int = 2
    bucket: int = 2_000_000
    min_count: int = 1
    epochs: int = 5
    lr: float = 0.1
    seed: int = 1


class Texts:
    """Texts as numbers of words: a table of distinct words, and where each text begins and ends."""

    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {END: 0}
        self.words = array("i")
        self.ends = array("q")
        self._label = PREFIX.encode()

    def add(self, text: str) -> None:
        """Add a text, which counts as one line."""
        for word in text.encode().translate(_SPACES).split(b" "):
            if word == END:  # fastText reads no further
                break
            if word and not word.startswith(self._label):  # which fastText would take for a label
                self.words.append(self.numbers.setdefault(word, len(self.numbers)))
        self.words.append(0)
        self.ends.append(len(self.words))

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def spans(self) -> NDArray[np.int64]:
        """Return where each text begins and ends among the words: (n, 2)."""
        ends = np.frombuffer(self.ends, np.int64)
        return np.stack([np.concatenate([[0], ends[:-1]]), ends], 1)


def hash_word(word: bytes) -> int:
    """Return fastText's hash of a word, FNV-1a over signed bytes, as the signed number that its n-grams are made of.

    >>> hash_word(b"a"), hash_word(b"mill")
    (-468965076, -2087816509)
    """
    value = _FNV_START
    for byte in word:
        signed = byte | 0xFFFFFF00 if byte > 127 else byte
        value = (value ^ signed) * _FNV_PRIME & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


@dataclass
class FastTextModel:
    """A model: the words of the vocabulary with their counts, the labels with theirs, and the vectors.

    `rows` is the row of each distinct word of the texts that it was made for, -1 for those that are not in the
    vocabulary; `hashes` are these words'.
    """

    options: TrainingOptions
    words: list[tuple[bytes, int]]
    labels: list[tuple[str, int]]
    rows: NDArray[np.int32]
    hashes: NDArray[np.int64]
    vectors: NDArray[np.float32]
    outputs: NDArray[np.float32]

    def weights(self, label: int, other: int) -> list[tuple[str, float]]:
        """Return each word of the vocabulary with how much it says for a label against another, greatest first."""
        said = self.vectors[: len(self.words)] @ (self.outputs[label] - self.outputs[other])
        order = np.argsort(-said, kind="stable")
        return [(self.words[row][0].decode("utf-8", "replace"), float(said[row])) for row in order.tolist()]

    def save(self, path: Path) -> None:
        """Write the model, atomically, as fastText writes a .bin."""
        options = self.options
        numbers = [options.dim, 5, options.epochs, options.min_count, 5, options.word_ngrams, _SOFTMAX, _SUPERVISED]
        numbers += [options.bucket, 0, 0, 100]
        tokens = sum(count for _, count in self.words)
        entries = [(word, count, 0) for word, count in self.words]
        entries += [((PREFIX + label).encode(), count, 1) for label, count in self.labels]
        with atomic_write(path) as temporary, temporary.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, *numbers, 1e-4))
            file.write(DICTIONARY.pack(len(entries), len(self.words), len(self.labels), tokens, -1))
            for word, count, kind in entries:
                file.write(word + b"\0" + struct.pack("<qb", count, kind))
            for matrix in (self.vectors, self.outputs):
                file.write(b"\0" + SHAPE.pack(*matrix.shape))
                file.write(matrix.data)


def train_fasttext(
    texts: Texts, chosen: Sequence[int], labels: Sequence[int], names: Sequence[str], options: TrainingOptions
) -> FastTextModel:
    """Train a model on some texts, which have these labels: numbers of `names`."""
    model = _new_model(texts, chosen, labels, names, options)
    words = np.frombuffer(texts.words, np.int32)
    spans = texts.spans[np.asarray(chosen, np.int64)]
    random = np.random.default_rng([options.seed, 1])
    steps = options.epochs * len(spans)
    for epoch in range(options.epochs):
        order = random.permutation(len(spans))
        train_epoch(
            words, spans[order], np.asarray(labels, np.int64)[order], model.rows, model.hashes, options.word_ngrams,
            options.bucket, len(model.words), model.vectors, model.outputs, options.lr, epoch * len(spans), steps,
        )  # fmt: skip
    return model


def _new_model(
    texts: Texts, chosen: Sequence[int], labels: Sequence[int], names: Sequence[str], options: TrainingOptions
) -> FastTextModel:
    words = np.frombuffer(texts.words, np.int32)
    counts = count_words(words, texts.spans[np.asarray(chosen, np.int64)], len(texts.numbers))
    frequent = np.flatnonzero(counts >= options.min_count)
    order = frequent[np.argsort(-counts[frequent], kind="stable")]
    known = list(texts.numbers)
    rows = np.full(len(known), -1, np.int32)
    rows[order] = np.arange(len(order), dtype=np.int32)
    hashes = np.fromiter(map(hash_word, known), np.int64, len(known))
    kept = [(known[number], int(counts[number])) for number in order.tolist()]
    of_labels = [(name, sum(label == number for label in labels)) for number, name in enumerate(names)]
    buckets = options.bucket if options.word_ngrams > 1 else 0
    vectors = np.empty((len(kept) + buckets, options.dim), np.float32)
    random = np.random.default_rng([options.seed, 0])
    for start in range(0, len(vectors), _ROWS):
        part = vectors[start : start + _ROWS]
        random.random(out=part, dtype=np.float32)
        part *= 2
        part -= 1
        part /= options.dim
    return FastTextModel(
        options, kept, of_labels, rows, hashes, vectors, np.zeros((len(names), options.dim), np.float32)
    )


@kernel
def count_words(words: NDArray[np.int32], spans: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return how often each of `size` words is in some texts."""
    counts = np.zeros(size, np.int64)
    for number in range(len(spans)):
        for i in range(spans[number, 0], spans[number, 1]):
            counts[words[i]] += 1
    return counts


@kernel
def find_features(
    words: NDArray[np.int32],
    rows: NDArray[np.int32],
    hashes: NDArray[np.int64],
    word_ngrams: int,
    bucket: int,
    first_bucket: int,
    features: NDArray[np.int64],
) -> int:
    """Write the rows of a text's features to `features`; return how many there are."""
    count = 0
    for i in range(len(words)):
        if rows[words[i]] >= 0:
            features[count] = rows[words[i]]
            count += 1
    for i in range(len(words)):
        joined = np.uint64(hashes[words[i]])
        for j in range(i + 1, min(len(words), i + word_ngrams)):
            joined = joined * _MULTIPLIER + np.uint64(hashes[words[j]])
            features[count] = first_bucket + np.int64(joined % np.uint64(bucket))
            count += 1
    return count


@kernel
def mean_vector(
    features: NDArray[np.int64], count: int, vectors: NDArray[np.float32], hidden: NDArray[np.float32]
) -> None:
    """Write the mean of the vectors of features to `hidden`; zeros without any."""
    hidden[:] = 0
    for i in range(count):
        for d in range(len(hidden)):
            hidden[d] += vectors[features[i], d]
    if count:
        scale = np.float32(1) / np.float32(count)
        for d in range(len(hidden)):
            hidden[d] *= scale


@kernel
def train_epoch(
    words: NDArray[np.int32],
    spans: NDArray[np.int64],
    labels: NDArray[np.int64],
    rows: NDArray[np.int32],
    hashes: NDArray[np.int64],
    word_ngrams: int,
    bucket: int,
    first_bucket: int,
    vectors: NDArray[np.float32],
    outputs: NDArray[np.float32],
    lr: float,
    done: int,
    steps: int,
) -> None:
    """Take a step of SGD on each text, `done` of `steps` having been taken before."""
    longest = 1
    for number in range(len(spans)):
        longest = max(longest, spans[number, 1] - spans[number, 0])
    features = np.empty(longest * word_ngrams, np.int64)
    dim = vectors.shape[1]
    hidden = np.empty(dim, np.float32)
    gradient = np.empty(dim, np.float32)
    shares = np.empty(len(outputs), np.float32)
    for number in range(len(spans)):
        rate = np.float32(lr * (1 - (done + number) / steps))
        own = words[spans[number, 0] : spans[number, 1]]
        count = find_features(own, rows, hashes, word_ngrams, bucket, first_bucket, features)
        if count == 0:
            continue
        mean_vector(features, count, vectors, hidden)
        largest = np.float32(-np.inf)
        for label in range(len(outputs)):
            total = np.float32(0)
            for d in range(dim):
                total += outputs[label, d] * hidden[d]
            shares[label] = total
            largest = max(largest, total)
        total = np.float32(0)
        for label in range(len(outputs)):
            shares[label] = np.exp(shares[label] - largest)
            total += shares[label]
        gradient[:] = 0
        for label in range(len(outputs)):
            is_label = np.float32(1) if label == labels[number] else np.float32(0)
            alpha = rate * (is_label - shares[label] / total)
            for d in range(dim):
                gradient[d] += alpha * outputs[label, d]
                outputs[label, d] += alpha * hidden[d]
        scale = np.float32(1) / np.float32(count)
        for i in range(count):
            for d in range(dim):
                vectors[features[i], d] += gradient[d] * scale
