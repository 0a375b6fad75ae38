"""Scores of texts by a fastText classifier: fastText's own, several times as fast as by its library.

fastText looks up the vectors of a text's features (words, word n-grams, subwords), takes their mean h, and the softmax
of W h. Here each vector v is multiplied by W once, as the model is read: W h is the mean of the features' W v. With two
labels only the difference of both products counts, so that a feature is one number instead of a hundred, and a model of
800 MB takes 8 MB. Sums are in float64, and fastText's in float32, whose rounding grows with the length of a text: where
it may be seen, a text is summed once more, as fastText does it.
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
from preprocessing.scoring.fasttext_features import MARGIN, Features, find_features, read_features
from preprocessing.scoring.fasttext_file import SHAPE, FastTextFile, read_fasttext

_SOFTMAX = 3
_MAX_LABELS = 16  # with more, the products would take as much memory as the vectors
_MAX_FLOAT32 = 128.0  # products up to this are stored as float32: scores differ by less than 1e-6
_ROWS = 1 << 14  # of the vectors that are multiplied at once
_FREQUENT = 2000  # words, the first of a dictionary, that say how far apart vectors are
# With a spread of 1, a score that fastText's rounding may change by nearly 1e-6: measured with models of 12 to 100
# dimensions and texts of up to 2 MB.
_MAX_DOUBT = 9.0
_MANY_FEATURES = 1 << 16  # from which rounding grows faster than doubt


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
    """A model that scores texts by the probability of one of its labels. Not thread-safe.

    `vectors` are those of features, as bytes of the model's file, and `outputs` (labels, dim) is W, the label's own row
    first. `products` (rows, n) are the products of each vector with W: for two labels the difference of both, for more
    those of all. A score whose doubt is above `max_doubt` is computed as fastText does; see score_texts.
    """

    features: Features
    products: NDArray[Any]
    vectors: NDArray[np.uint8]
    outputs: NDArray[np.float32]
    max_doubt: float

    @classmethod
    def read(cls, path: Path, label: str) -> "FastTextScorer":
        """Read a model that `can_score` allows, and the products with a label's vector."""
        model = read_fasttext(path)
        with wrap_read_errors(path), path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        features, stop = read_features(model, np.frombuffer(content, np.uint8))
        vectors, start = _matrix(content, stop)
        outputs, _ = _matrix(content, start)
        own = model.labels.index(label)
        outputs = np.vstack([outputs[own : own + 1], np.delete(outputs, own, axis=0)])
        products = _multiply(vectors, outputs)
        raw = np.ndarray((vectors.nbytes,), np.uint8, content, start - vectors.nbytes)
        return cls(features, products, raw, outputs, _MAX_DOUBT / _spread(vectors, outputs))

    def score(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the probability of the label for each text; 0 for one that the model says nothing of."""
        encoded = [text.encode() for text in texts]
        sizes = np.array([len(data) for data in encoded], np.int64)
        scores = np.empty(len(texts), np.float32)
        max_words, max_features = self.features.max_counts(int(sizes.max(initial=0)))
        with reserve_memory(2 * int(sizes.sum()) + 4 * (max_words + max_features), "a document"):
            text, eights = _join(encoded)
            hashes = np.empty(max_words, np.int32)
            rows = np.empty(max_features, np.int32)
            score_texts(
                text, eights, sizes, self.features, self.products, self.vectors, self.outputs, self.max_doubt, hashes,
                rows, scores,
            )  # fmt: skip
        return scores


def _join(encoded: Sequence[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """Return texts, each with a space behind it, and the eight bytes from each byte on."""
    data = b" ".join([*encoded, bytes(MARGIN)])
    return np.frombuffer(data, np.uint8), np.ndarray((len(data) - 7,), np.uint64, data, strides=(1,))


def _matrix(content: mmap.mmap, start: int) -> tuple[NDArray[np.float32], int]:
    """Return a matrix whose flag for quantization is at `start`, and where it ends."""
    first = start + 1
    rows, columns = SHAPE.unpack_from(content, first)
    values = np.frombuffer(content, "<f4", rows * columns, first + SHAPE.size)
    return values.reshape(rows, columns), first + SHAPE.size + values.nbytes


def _spread(vectors: NDArray[np.float32], outputs: NDArray[np.float32]) -> float:
    """Return how far a vector of a word moves the label's sum away from another label's, if dimensions are independent.

    fastText rounds each dimension for itself, so that this decides how much of its rounding is seen in a score.
    """
    frequent = vectors[:_FREQUENT].astype(np.float64)
    weights = outputs[:1].astype(np.float64) - outputs[1:]
    squares = np.square(weights) @ np.square(frequent).mean(axis=0)
    return float(np.sqrt(squares.max())) or 1.0


def _multiply(vectors: NDArray[np.float32], outputs: NDArray[np.float32]) -> NDArray[Any]:
    """Return the products of FastTextScorer."""
    weights = outputs.astype(np.float64)
    if len(outputs) == 2:
        weights = weights[:1] - weights[1:]
    products = np.empty((len(vectors), len(weights)), np.float64)
    for start in range(0, len(vectors), _ROWS):
        rows = slice(start, start + _ROWS)
        products[rows] = vectors[rows].astype(np.float64) @ weights.T
    is_small = np.abs(products).max(initial=0) <= _MAX_FLOAT32
    return products.astype(np.float32) if is_small else products


@kernel
def score_texts(
    text: NDArray[np.uint8],
    eights: NDArray[np.uint64],
    sizes: NDArray[np.int64],
    model: Features,
    products: NDArray[Any],
    vectors: NDArray[np.uint8],
    outputs: NDArray[np.float32],
    max_doubt: float,
    hashes: NDArray[np.int32],
    rows: NDArray[np.int32],
    scores: NDArray[np.float32],
) -> None:
    """Write the score of each text; they follow one another in `text`, each with a space behind it.

    `eights` are the eight bytes from each one of `text` on. `hashes` and `rows` have room for the words and features of
    the longest. The error of a sum of n numbers grows as n to the power of 1.5, that of their mean as the root of n: a
    score's doubt is in proportion to what it makes of the score.
    """
    values = vectors.view(np.float32)
    sums = np.empty(products.shape[1], np.float64)
    total = np.empty(outputs.shape[1], np.float32)
    first = 0
    for number in range(len(sizes)):
        stop = first + sizes[number]
        count = find_features(text, eights, first, stop, model, hashes, rows)
        # All at once, as this waits for memory far less than one at a time.
        add_products(rows, count, products, sums)
        score = probability(sums, count)
        if count > _MANY_FEATURES or np.sqrt(count) * score * (1 - score) > max_doubt:
            add_vectors(rows, count, values, total)
            score = predict(total, count, outputs)
        scores[number] = score
        first = stop + 1


@kernel
def add_products(rows: NDArray[np.int32], count: int, products: NDArray[Any], sums: NDArray[np.float64]) -> None:
    """Write the sums of the products of the first `count` rows."""
    for i in range(len(sums)):
        total = 0.0
        for j in range(count):
            total += products[np.uint64(rows[j]), i]
        sums[i] = total


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


@kernel
def add_vectors(rows: NDArray[np.int32], count: int, values: NDArray[np.float32], total: NDArray[np.float32]) -> None:
    """Write the sum of the vectors of the first `count` rows, added one after another as fastText does."""
    dim = np.uint64(len(total))
    total[:] = 0
    for i in range(count):
        start = np.uint64(rows[i]) * dim
        for j in range(dim):
            total[j] += values[start + j]


@kernel
def predict(total: NDArray[np.float32], features: int, outputs: NDArray[np.float32]) -> np.float32:
    """Return the softmax of the first label from the sum of the features' vectors, as fastText rounds it."""
    mean = total * np.float32(1 / features)
    sums = np.zeros(len(outputs), np.float32)
    for i in range(len(outputs)):
        for j in range(len(mean)):
            sums[i] += outputs[i, j] * mean[j]
    highest = sums.max()
    every = np.float32(0)
    for i in range(len(sums)):
        sums[i] = np.exp(sums[i] - highest)
        every += sums[i]
    return np.float32(np.exp(np.float32(np.log(sums[0] / every + 1e-5))))
