"""Command: train a fastText model that tells good documents from others, for [scores.NAME] of a run."""

import heapq
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from gristmill.command import command
from gristmill.errors import UsageError, require
from gristmill.io.readers import read_corpus
from gristmill.storage.files import reject_remote
from gristmill.storage.local import sha256_file
from gristmill.text import text_digest
from gristmill.wording import count_of
from preprocessing.mixing.sampling import check_seed, random_number
from preprocessing.scoring.fasttext_file import PREFIX
from preprocessing.scoring.fasttext_scores import FastTextScorer
from preprocessing.scoring.fasttext_training import Texts, TrainingOptions, train_fasttext

LABELS = ("positive", "negative")
_FEW = 20  # documents of a label, without which nothing can be learnt and held out
_SHOWN = 12  # words that weigh most
_LARGEST = 1 << 31


@dataclass(frozen=True)
class TrainedScorer:
    """Result of the training: the model's file and SHA-256, documents of both labels, and measures on the holdout.

    `accuracy`, `precision` and `recall` of the positive ones are at a score of 0.5; `area` is that under the ROC curve.
    `positive` and `negative` are the words that weigh most for either.
    """

    path: Path
    sha256: str
    trained: tuple[int, int]
    held_out: tuple[int, int]
    accuracy: float
    precision: float
    recall: float
    area: float
    positive: list[str]
    negative: list[str]

    def __rich__(self) -> Table:
        table = Table(box=None, show_header=False)
        rows = {
            "model": str(self.path),
            "SHA-256": self.sha256,
            "trained on": f"{self.trained[0]:,} positive, {self.trained[1]:,} negative",
            "held out": f"{self.held_out[0]:,} positive, {self.held_out[1]:,} negative",
            "accuracy": f"{self.accuracy:.2%}",
            "precision at 0.5": f"{self.precision:.2%}",
            "recall at 0.5": f"{self.recall:.2%}",
            "area under ROC": f"{self.area:.4f}",
            "words for positive": " ".join(self.positive),
            "words for negative": " ".join(self.negative),
        }
        for name, value in rows.items():
            table.add_row(name, value)
        return table


def train_scorer(
    positive: Path,
    negative: Path,
    out: Path,
    *,
    documents: int = 200_000,
    holdout: float = 0.1,
    dim: int = 100,
    word_ngrams: int = 2,
    bucket: int = 2_000_000,
    min_count: int = 5,
    epochs: int = 5,
    lr: float = 0.1,
    seed: int = 1,
    text_column: str = "text",
) -> TrainedScorer:
    """Train a fastText model whose label `positive` is a score of quality, as DCLM's.

    The file is fastText's own .bin. The same documents and seed give the same bytes. It trains on one core, some
    megabytes of text a second, with the texts in memory.

    Args:
        positive: Folder of documents to find more of, in any format that a run reads.
        negative: Folder of ordinary documents.
        out: The model to write, such as edu.bin.
        documents: Most documents of each folder, a random sample.
        holdout: Fraction of them that is held out, to measure the model; equal texts are on the same side.
        dim: Numbers of a vector.
        word_ngrams: Words of the longest n-gram; 1: single words.
        bucket: Vectors for n-grams: each takes 4 * dim bytes of the file.
        min_count: Words that are there fewer times have no vector of their own.
        epochs: How often the documents are read.
        lr: Learning rate at the start; it falls to 0.
        seed: Seed of the sample, the holdout, the first vectors and the order.
        text_column: The column or field that holds the text.

    Returns:
        The measures on what was held out, and the words that weigh most.
    """
    check_seed(seed)
    reject_remote(out, option="--out")
    _check_options(documents, holdout, dim, word_ngrams, bucket, min_count, epochs, lr)
    require(positive.resolve() != negative.resolve(), f"--positive and --negative are both {positive}: expected two")
    texts = Texts()
    trained = list[int]()  # numbers of texts
    labels_of_trained = list[int]()
    held_texts = list[str]()
    labels_of_held = list[int]()
    for label, folder in enumerate((positive, negative)):
        sample = _sample(folder, documents, seed, text_column)
        if len(sample) < _FEW:
            raise UsageError(
                f"--{LABELS[label]} {folder}: expected {_FEW} documents or more, got {len(sample)}; give more"
            )
        for text in sample:
            if _draw(text, seed) < holdout * (1 << 64):
                held_texts.append(text)
                labels_of_held.append(label)
            else:
                trained.append(len(texts))
                labels_of_trained.append(label)
            texts.add(text)
    if not (set(labels_of_trained) == set(labels_of_held) == {0, 1}):
        raise UsageError(
            f"--holdout {holdout}: expected documents of both labels on both sides, got "
            f"{count_of(len(held_texts), 'document')} held out; try another --holdout, or more documents"
        )
    options = TrainingOptions(dim, word_ngrams, bucket, min_count, epochs, lr, seed)
    model = train_fasttext(texts, trained, labels_of_trained, LABELS, options)
    model.save(out)
    scores = FastTextScorer.read(out, PREFIX + LABELS[0]).score(held_texts)
    is_positive = np.array(labels_of_held) == 0
    words = [word for word, _ in model.weights(0, 1)]
    return TrainedScorer(
        out,
        sha256_file(out),
        (labels_of_trained.count(0), labels_of_trained.count(1)),
        (labels_of_held.count(0), labels_of_held.count(1)),
        *_measure(scores, is_positive),
        words[:_SHOWN],
        words[: -_SHOWN - 1 : -1],
    )


def _check_options(
    documents: int, holdout: float, dim: int, word_ngrams: int, bucket: int, min_count: int, epochs: int, lr: float
) -> None:
    require(0 < holdout < 1, f"--holdout {holdout}: expected a fraction between 0 and 1, such as 0.1")
    minimums = {
        "documents": documents, "dim": dim, "word_ngrams": word_ngrams, "bucket": bucket, "min_count": min_count,
        "epochs": epochs,
    }  # fmt: skip
    for name, value in minimums.items():
        require(0 < value < _LARGEST, f"--{name} {value}: expected a number from 1 to {_LARGEST - 1:,}")
    require(0 < lr < 100, f"--lr {lr}: expected a number above 0, such as 0.1")


def _sample(folder: Path, count: int, seed: int, text_column: str) -> list[str]:
    """Return the texts of a random sample of a folder's documents, in the order of the corpus."""
    drawn = list[tuple[int, int, str]]()  # a heap: the largest number first, as it goes first
    for position, (number, text) in enumerate(_numbered(folder, seed, text_column)):
        item = (-number, -position, text)
        if len(drawn) < count:
            heapq.heappush(drawn, item)
        elif item > drawn[0]:
            heapq.heapreplace(drawn, item)
    return [text for _, _, text in sorted(drawn, key=lambda item: -item[1])]


def _numbered(folder: Path, seed: int, text_column: str) -> Iterator[tuple[int, str]]:
    """Yield each document's random number and text."""
    for document in read_corpus(folder, text_column, on_malformed="skip"):
        yield random_number(seed, "scorer", document.key.file, document.key.row), document.text


def _draw(text: str, seed: int) -> int:
    """Return a number below 2^64 that decides whether a text is held out: the same for equal texts."""
    return random_number(seed, "held out", text_digest(text).hex(), 0)


def _measure(scores: NDArray[np.float32], is_positive: NDArray[np.bool_]) -> tuple[float, float, float, float]:
    """Return accuracy, precision, recall and the area under the ROC curve; precision is NaN if nothing is positive."""
    is_predicted = scores >= 0.5
    hits = int((is_predicted & is_positive).sum())
    predicted = int(is_predicted.sum())
    positives = int(is_positive.sum())
    negatives = len(scores) - positives
    values, value_of = np.unique(scores, return_inverse=True)
    counts = np.bincount(value_of, minlength=len(values))
    ranks = np.cumsum(counts) - (counts - 1) / 2  # of equal scores the mean rank
    area = (ranks[value_of][is_positive].sum() - positives * (positives + 1) / 2) / (positives * negatives)
    accuracy = float((is_predicted == is_positive).mean())
    precision = float("nan")
    if predicted:
        precision = hits / predicted
    return accuracy, precision, hits / positives, float(area)


if __name__ == "__main__":
    command(train_scorer)
