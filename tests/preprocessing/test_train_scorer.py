"""train_scorer: fastText reads the model and predicts the same; the same texts give the same bytes; it learns."""

import json
import random
from pathlib import Path

import fasttext
import numpy as np
import pytest

from gristmill.errors import UsageError
from preprocessing.scoring.fasttext_file import read_fasttext
from preprocessing.scoring.fasttext_scores import FastTextScorer
from preprocessing.scoring.fasttext_training import (
    Texts,
    TrainingOptions,
    find_features,
    hash_word,
    train_fasttext,
)
from preprocessing.train_scorer import train_scorer
from tests.preprocessing.fasttext_models import BAD, GOOD

ODD = [
    "",
    " \t ",
    "two\nlines \x0b of\x00the\fmill\r",
    "naïve 東京 😀 Ünïcode",
    "__label__positive click here",
    "the mill </s> click here",
    "unseen " * 9,
]


def texts_of(words: list[str], count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    mixed = [*words * 3, *GOOD, *BAD]
    return [" ".join(chance.choices(mixed, k=chance.randrange(4, 60))) for _ in range(count)]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Sentences of a mill, and advertisements; each has words of the other."""
    for number, (name, words) in enumerate({"positive": GOOD, "negative": BAD}.items()):
        path = tmp_path / name / "web/a.jsonl"
        path.parent.mkdir(parents=True)
        lines = [json.dumps({"text": text}) for text in texts_of(words, 300, number)]
        path.write_text("\n".join(lines) + "\n")
    return tmp_path / "positive", tmp_path / "negative"


SMALL = {"dim": 6, "bucket": 500, "min_count": 2, "epochs": 4, "lr": 0.3}


def test_it_learns_and_says_by_what(folders, tmp_path: Path) -> None:
    found = train_scorer(*folders, tmp_path / "edu.bin", **SMALL)
    assert found.accuracy > 0.9 and found.precision > 0.9 and found.recall > 0.9 and found.area > 0.95
    assert sum(found.trained) + sum(found.held_out) == 600 and min(found.held_out) > 10
    assert len({*found.positive} & {*GOOD}) > 8 and len({*found.negative} & {*BAD}) > 8
    assert read_fasttext(tmp_path / "edu.bin").labels == ("__label__positive", "__label__negative")


def test_the_same_documents_give_the_same_bytes(folders, tmp_path: Path) -> None:
    first = train_scorer(*folders, tmp_path / "a.bin", **SMALL)
    second = train_scorer(*folders, tmp_path / "b.bin", **SMALL)
    other = train_scorer(*folders, tmp_path / "c.bin", seed=2, **SMALL)
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    assert first.sha256 == second.sha256 != other.sha256


@pytest.mark.parametrize("word_ngrams", [1, 2, 3])
def test_fasttext_predicts_the_same_with_the_model(tmp_path: Path, word_ngrams: int) -> None:
    texts = Texts()
    lines = [*texts_of(GOOD, 80, 1), *texts_of(BAD, 80, 2), *ODD]
    for text in lines:
        texts.add(text)
    options = TrainingOptions(dim=5, word_ngrams=word_ngrams, bucket=300, min_count=3, epochs=3, lr=0.5)
    model = train_fasttext(texts, range(160), [0] * 80 + [1] * 80, ["positive", "negative"], options)
    model.save(tmp_path / "m.bin")
    own = FastTextScorer.read(tmp_path / "m.bin", "__label__positive").score(lines)
    library = fasttext.load_model(str(tmp_path / "m.bin"))
    expected = [dict(zip(*library.predict(line.replace("\n", " "), k=-1), strict=True)) for line in lines]
    scores = [found["__label__positive"] for found in expected]
    np.testing.assert_allclose(own, scores, rtol=0, atol=1e-6)
    assert np.ptp(scores) > 0.2


def test_training_is_sgd_on_the_softmax(tmp_path: Path) -> None:
    """An epoch in float64 and in plain NumPy gives the same vectors."""
    texts = Texts()
    for text in [*texts_of(GOOD, 10, 1), *texts_of(BAD, 10, 2)]:
        texts.add(text)
    labels = [0] * 10 + [1] * 10
    options = TrainingOptions(dim=4, word_ngrams=2, bucket=50, min_count=2, epochs=2, lr=0.4, seed=3)
    model = train_fasttext(texts, range(20), labels, ["a", "b"], options)
    vectors = _first_vectors(options, len(model.words) + 50)
    outputs = np.zeros((2, 4))
    chance = np.random.default_rng([3, 1])
    words = np.frombuffer(texts.words, np.int32)
    room = np.empty(10_000, np.int64)
    step = 0
    for _ in range(2):
        for number in chance.permutation(20).tolist():
            start, end = texts.spans[number]
            count = find_features(words[start:end], model.rows, model.hashes, 2, 50, len(model.words), room)
            features = room[:count].copy()
            rate = 0.4 * (1 - step / 40)
            hidden = vectors[features].mean(0)
            shares = np.exp(outputs @ hidden)
            error = rate * ((np.arange(2) == labels[number]) - shares / shares.sum())
            gradient = error @ outputs
            outputs = outputs + np.outer(error, hidden)
            np.add.at(vectors, features, gradient / count)
            step += 1
    np.testing.assert_allclose(model.outputs, outputs, atol=1e-5)
    np.testing.assert_allclose(model.vectors, vectors, atol=1e-5)


def _first_vectors(options: TrainingOptions, rows: int) -> np.ndarray:
    drawn = np.random.default_rng([options.seed, 0]).random((rows, options.dim), dtype=np.float32)
    return ((drawn * 2 - 1) / options.dim).astype(np.float64)


def test_hashes_are_fasttexts() -> None:
    assert hash_word(b"") == 2166136261 - (1 << 32)
    assert hash_word(b"a") == 0xE40C292C - (1 << 32)  # as FNV-1a is published
    assert hash_word("é".encode()) != hash_word(b"e")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"holdout": 0.0}, "--holdout 0.0: expected a fraction between 0 and 1"),
        ({"documents": 0}, "--documents 0: expected a number from 1"),
        ({"lr": -1.0}, "--lr -1.0: expected a number above 0"),
        ({"word_ngrams": 0}, "--word_ngrams 0: expected a number from 1"),
        ({"holdout": 0.0001}, "--holdout 0.0001: expected documents of both labels on both sides, got 0 documents"),
        ({"documents": 5}, "--positive .*: expected 20 documents or more, got 5; give more"),
    ],
)
def test_bad_options(folders, tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        train_scorer(*folders, tmp_path / "edu.bin", **(SMALL | options))
    assert not (tmp_path / "edu.bin").exists()


def test_bad_folders(folders, tmp_path: Path) -> None:
    positive, _ = folders
    with pytest.raises(UsageError, match="--positive and --negative are both"):
        train_scorer(positive, positive, tmp_path / "edu.bin")
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="none holds no corpus file"):
        train_scorer(tmp_path / "none", positive, tmp_path / "edu.bin")
