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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill.budget import reserve_memory
from gristmill.errors import wrap_read_errors
from gristmill.kernels import kernel
from preprocessing.scoring.fasttext_dictionary import FeatureTable, read_features
from preprocessing.scoring.fasttext_features import find_features
from preprocessing.scoring.fasttext_file import FastTextFile, read_sizes
from preprocessing.scoring.fasttext_products import find_products, read_matrix, read_outputs
from preprocessing.scoring.fasttext_words import JoinedTexts, WordGroup

_SOFTMAX = 3
_MAX_LABELS = 16  # with more, the products would take as much memory as the vectors
_FREQUENT = 2000  # words, the first of a dictionary, that say how far apart vectors are
# With a spread of 1, a score that fastText's rounding may change by nearly 1e-6: measured with models of 12 to 100
# dimensions and texts of up to 2 MB.
_MAX_DOUBT = 9.0
_MANY_FEATURES = 1 << 16  # from which rounding grows faster than doubt
_FEW_FEATURES = 100  # up to which it cannot be seen, even if all are the same
_EVERY = 4  # feature, of a text, is compared with the others
_MAX_COMPARED = 1 << 11
_SEEN_BITS = 13  # numbers of features that are told apart, a power of two
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # odd, of bits that look random


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

    features: FeatureTable
    products: NDArray[Any]
    vectors: NDArray[np.uint8]
    outputs: NDArray[np.float32]
    max_doubt: float

    @classmethod
    def read(cls, path: Path, label: str, version: str = "") -> "FastTextScorer":
        """Read a model that `can_score` allows, and the products with a label's vector; see find_products."""
        model = read_sizes(path)
        with wrap_read_errors(path), path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        features, stop = read_features(model, np.frombuffer(content, np.uint8))
        vectors, end = read_matrix(content, stop)
        outputs = read_outputs(content, end, features.number_of(label) - model.words)
        products = find_products(vectors, outputs, version)
        raw = np.ndarray((vectors.nbytes,), np.uint8, content, end - vectors.nbytes)
        return cls(features, products, raw, outputs, _MAX_DOUBT / _spread(vectors, outputs))

    def score(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the probability of the label for each text; 0 for one that the model says nothing of."""
        joined = JoinedTexts.join([text.encode() for text in texts])
        scores = np.empty(len(texts), np.float32)
        max_words, max_features = self.features.max_counts(int(joined.sizes.max(initial=0)))
        with reserve_memory(2 * joined.content.nbytes + 4 * (max_words + max_features), "a document"):
            hashes = np.empty(max_words, np.int32)
            rows = np.empty(max_features, np.int32)
            model = Matrices(self.products, self.vectors, self.outputs, self.max_doubt)
            score_texts(joined, self.features, model, WordGroup.new(), hashes, rows, scores)
        return scores


def _spread(vectors: NDArray[np.float32], outputs: NDArray[np.float32]) -> float:
    """Return how far a vector of a word moves the label's sum away from another label's, if dimensions are independent.

    fastText rounds each dimension for itself, so that this decides how much of its rounding is seen in a score.
    """
    frequent = vectors[:_FREQUENT].astype(np.float64)
    weights = outputs[:1].astype(np.float64) - outputs[1:]
    squares = np.square(weights) @ np.square(frequent).mean(axis=0)
    return float(np.sqrt(squares.max())) or 1.0


class Matrices(NamedTuple):
    """The numbers of a FastTextScorer that its kernels compute with."""

    products: NDArray[Any]
    vectors: NDArray[np.uint8]
    outputs: NDArray[np.float32]
    max_doubt: float


@kernel
def score_texts(
    texts: JoinedTexts,
    features: FeatureTable,
    model: Matrices,
    group: WordGroup,
    hashes: NDArray[np.int32],
    rows: NDArray[np.int32],
    scores: NDArray[np.float32],
) -> None:
    """Write the score of each text.

    `hashes` and `rows` have room for the words and features of the longest. The error of a sum of n numbers grows as n
    to the power of 1.5, that of their mean as the root of n: a score's doubt is in proportion to what it makes of the
    score. A text that repeats few features is rounded the same way each time, so that its error grows as n.
    """
    values = model.vectors.view(np.float32)
    sums = np.empty(model.products.shape[1], np.float64)
    total = np.empty(model.outputs.shape[1], np.float32)
    seen = np.empty(1 << _SEEN_BITS, np.bool_)
    first = 0
    for number in range(len(texts.sizes)):
        stop = first + texts.sizes[number]
        count = find_features(texts, first, stop, features, group, hashes, rows)
        # All at once, as this waits for memory far less than one at a time.
        add_products(rows, count, model.products, sums)
        score = probability(sums, count)
        doubt = score * (1 - score)
        is_doubtful = count > _MANY_FEATURES or np.sqrt(count) * doubt > model.max_doubt
        if is_doubtful or (count * doubt > _FEW_FEATURES / 4 and repeats_itself(rows, count, seen)):
            add_vectors(rows, count, values, total)
            score = predict(total, count, model.outputs)
        scores[number] = score
        first = stop + 1


@kernel
def add_products(rows: NDArray[np.int32], count: int, products: NDArray[Any], sums: NDArray[np.float64]) -> None:
    """Write the sums of the products of the first `count` rows: four at a time, as each addition waits for the last."""
    whole = count - count % 4
    for i in range(len(sums)):
        first = second = third = fourth = 0.0
        for j in range(0, whole, 4):
            at = np.uint64(j)
            first += products[np.uint64(rows[at]), i]
            second += products[np.uint64(rows[at + np.uint64(1)]), i]
            third += products[np.uint64(rows[at + np.uint64(2)]), i]
            fourth += products[np.uint64(rows[at + np.uint64(3)]), i]
        for j in range(whole, count):
            first += products[np.uint64(rows[j]), i]
        sums[i] = (first + second) + (third + fourth)


@kernel
def repeats_itself(rows: NDArray[np.int32], count: int, seen: NDArray[np.bool_]) -> bool:
    """Return whether fewer than half of a text's features differ, of those that are compared."""
    if count <= _FEW_FEATURES:
        return False
    step = max(_EVERY, count // _MAX_COMPARED)
    seen[:] = False
    different = 0
    compared = 0
    for i in range(0, count, step):
        place = (np.uint64(rows[i]) * _SPREAD) >> np.uint64(64 - _SEEN_BITS)
        different += not seen[place]
        seen[place] = True
        compared += 1
    return bool(2 * different < compared)


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
    """Write the sum of the vectors of the first `count` rows, added one after another as fastText does.

    The loop over dimensions has eight rows at a time: each dimension is loaded and stored once for them, and vector
    instructions take many dimensions at once.
    """
    dim = np.uint64(len(total))
    total[:] = 0
    whole = np.uint64(count - count % 8)
    for i in range(np.uint64(0), whole, np.uint64(8)):
        a = np.uint64(rows[i]) * dim
        b = np.uint64(rows[i + np.uint64(1)]) * dim
        c = np.uint64(rows[i + np.uint64(2)]) * dim
        d = np.uint64(rows[i + np.uint64(3)]) * dim
        e = np.uint64(rows[i + np.uint64(4)]) * dim
        f = np.uint64(rows[i + np.uint64(5)]) * dim
        g = np.uint64(rows[i + np.uint64(6)]) * dim
        h = np.uint64(rows[i + np.uint64(7)]) * dim
        for j in range(dim):
            first_half = (((total[j] + values[a + j]) + values[b + j]) + values[c + j]) + values[d + j]
            total[j] = (((first_half + values[e + j]) + values[f + j]) + values[g + j]) + values[h + j]
    for i in range(whole, np.uint64(count)):
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
    highest = sums[0]
    for i in range(1, len(sums)):  # sums.max() would have numba import scipy.linalg: a tenth of a second
        highest = max(highest, sums[i])
    every = np.float32(0)
    for i in range(len(sums)):
        sums[i] = np.exp(sums[i] - highest)
        every += sums[i]
    return np.float32(np.exp(np.float32(np.log(sums[0] / every + 1e-5))))
