"""Kernels score as fastText's own library does, for 10,000 documents of all scripts and models of any shape."""

import random
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import fasttext
import numpy as np
import pytest

from preprocessing.scoring import fasttext_products
from preprocessing.scoring.fasttext_dictionary import FeatureTable
from preprocessing.scoring.fasttext_features import add_pairs, find_features
from preprocessing.scoring.fasttext_file import DICTIONARY, HEADER, MAGIC, SHAPE, read_fasttext
from preprocessing.scoring.fasttext_products import keep_products
from preprocessing.scoring.fasttext_scores import FastTextScorer, can_score
from preprocessing.scoring.fasttext_words import JoinedTexts, WordGroup

SCRIPTS = [
    ("the mill grinds wheat into flour and bread is baked at dawn", " "),
    ("Größe naïve façade Ærø İstanbul łódź", " "),
    ("мельница мелет зерно в муку каждый день", " "),
    ("ο μύλος αλέθει το σιτάρι", " "),
    ("المطحنة تطحن القمح إلى دقيق", " "),
    ("הטחנה טוחנת חיטה לקמח", " "),
    ("चक्की गेहूँ को आटे में पीसती है", " "),
    ("โรงสีบดข้าวสาลีเป็นแป้ง ทุกวัน", " "),
    ("방앗간은 밀을 밀가루로 빻는다", " "),
    ("水車小屋 は 小麦 を 挽く", "\u3000"),
    ("磨坊 把 小麦 磨成 面粉", " "),
    ("😀 👩‍👩‍👧‍👦 🇩🇪 ☕️ 𝔐𝔦𝔩𝔩", " "),
]
SPECIAL = ["</s>", "__label__a", "__label__new", "__label__", "_", "<", ">", "a" * 300, "\u00a0", "\ufeff", "\x1c"]
SPACES = [" ", "  ", "\n", "\t", "\r\n", "\v", "\f", "\0"]


def texts_of_all_scripts(count: int) -> list[str]:
    """Texts of words of one script, or of several, with some that are special to fastText, of 0 to 400 words."""
    chance = random.Random(11)
    words = [sentence.split(space) for sentence, space in SCRIPTS]
    every = [word for script in words for word in script]
    texts = ["", " ", "\n\n", *SPECIAL]
    while len(texts) < count:
        script = chance.choice([*words, every])
        chosen = chance.choices(script, k=int(400 ** chance.random()))
        if chance.random() < 0.2:
            chosen[chance.randrange(len(chosen))] = chance.choice(SPECIAL)
        chosen = [word[::-1] if chance.random() < 0.1 else word for word in chosen]  # unknown ones
        texts.append("".join(word + chance.choice(SPACES) for word in chosen))
    return texts


@dataclass(frozen=True)
class Shape:
    word_ngrams: int = 2
    min_subword: int = 0
    max_subword: int = 0
    labels: tuple[str, ...] = ("__label__a", "__label__b")
    has_end: bool = True
    scale: float = 0.15  # of the vectors
    version: int = 12
    bucket: int = 1000
    words: tuple[bytes, ...] = tuple(
        word.encode() for sentence, space in SCRIPTS for word in sentence.split(space)[::2]
    )


def write_random_model(path: Path, shape: Shape) -> Path:
    """Write a softmax model with random vectors, whose vocabulary has every second word of SCRIPTS."""
    random = np.random.default_rng(5)
    words = list(dict.fromkeys([*([b"</s>"] if shape.has_end else []), *shape.words]))
    bucket = shape.bucket if shape.word_ngrams > 1 or shape.max_subword else 0
    numbers = [12, 5, 5, 1, 5, shape.word_ngrams, 3, 3, bucket, shape.min_subword, shape.max_subword, 100]
    entries = [(word, 9, 0) for word in words] + [(label.encode(), 5, 1) for label in shape.labels]
    rows = len(words) + bucket
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, shape.version, *numbers, 1e-4))
        file.write(DICTIONARY.pack(len(entries), len(words), len(shape.labels), 100, -1))
        for word, count, kind in entries:
            file.write(word + b"\0" + struct.pack("<qb", count, kind))
        for matrix in (random.normal(size=(rows, 12)), random.normal(size=(len(shape.labels), 12))):
            file.write(b"\0" + SHAPE.pack(*matrix.shape) + (matrix * 3 * shape.scale).astype("<f4").tobytes())
    return path


def features_of_no_words(bucket: int) -> FeatureTable:
    return FeatureTable(
        np.zeros((2, 4), np.uint64),
        np.zeros(2, np.uint64),
        np.zeros(0, np.uint8),
        np.zeros(1, np.int64),
        0,
        -1,
        2,
        bucket,
        0,
        0,
    )


SHAPES = {
    "words": Shape(1),
    "bigrams": Shape(),
    "bigrams in many rows": Shape(bucket=5003),
    "trigrams": Shape(3),
    "five-grams": Shape(5),
    "subwords": Shape(1, 3, 5),
    "subwords of one character": Shape(2, 1, 3),
    "subwords that version 11 does not have": Shape(2, 3, 5, version=11),
    "labels": Shape(2, 2, 4, ("__label__a", "__label__b", "__label__c", "__label__mill")),
    "other prefix": Shape(labels=("__class__a", "wheat", "磨成")),
    "no end": Shape(has_end=False),
    "words alone, no end": Shape(1, has_end=False),
    "large numbers": Shape(scale=4.0),
}


@pytest.mark.parametrize("name", SHAPES)
def test_scores_are_the_librarys_for_10_000_documents(tmp_path: Path, name: str) -> None:
    path = write_random_model(tmp_path / "m.bin", SHAPES[name])
    assert can_score(read_fasttext(path))
    texts = texts_of_all_scripts(10_000)
    library = fasttext.load_model(str(path))
    predicted = [
        dict(zip(*library.predict(text.replace("\n", " "), k=-1, threshold=-1), strict=True)) for text in texts
    ]
    for label in SHAPES[name].labels:
        expected = np.array([of_text.get(label, 0.0) for of_text in predicted])
        found = FastTextScorer.read(path, label).score(texts)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        assert expected.max() - expected.min() > 0.15


@pytest.mark.parametrize("name", ["bigrams", "five-grams", "subwords", "labels", "large numbers"])
def test_long_texts_have_the_rounding_of_the_library(tmp_path: Path, name: str) -> None:
    """Its sums in float32 of many vectors are off by up to 1e-4, and the scores are none the less equal."""
    path = write_random_model(tmp_path / "m.bin", SHAPES[name])
    words = texts_of_all_scripts(4000)
    words = [text for text in words if "</s>" not in text]
    texts = [" ".join(words[start:]) for start in range(0, len(words), len(words) // 6)]
    assert max(len(text.encode()) for text in texts) > 2_000_000
    library = fasttext.load_model(str(path))
    label = SHAPES[name].labels[0]
    expected = []
    for text in texts:
        labels, chances = library.predict(text.replace("\n", " "), k=-1, threshold=-1)
        expected.append(dict(zip(labels, chances, strict=True))[label])
    found = FastTextScorer.read(path, label).score(texts)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-7)


@pytest.mark.parametrize("name", ["words", "bigrams", "subwords"])
def test_texts_that_repeat_words_have_the_rounding_of_the_library(tmp_path: Path, name: str) -> None:
    """It rounds the same way each time, so that its scores are off by up to 1e-5, and ours are as well."""
    path = write_random_model(tmp_path / "m.bin", SHAPES[name])
    words = [word for sentence, space in SCRIPTS for word in sentence.split(space)]
    texts = [(word + " ") * count for word in words[::3] for count in (110, 400, 3000)]
    texts += [" ".join(words[start : start + 20]) * 400 for start in range(0, len(words) - 20, 9)]
    library = fasttext.load_model(str(path))
    scores = FastTextScorer.read(path, "__label__a").score(texts)
    for text, score in zip(texts, scores, strict=True):
        labels, chances = library.predict(text, k=-1, threshold=-1)
        assert abs(dict(zip(labels, chances, strict=True))["__label__a"] - score) < 1e-6, text[:50]


def test_products_that_are_large_have_more_digits(tmp_path: Path) -> None:
    kinds = {}
    for name in ("bigrams", "large numbers"):
        path = write_random_model(tmp_path / f"{name}.bin", SHAPES[name])
        kinds[name] = FastTextScorer.read(path, "__label__a").products.dtype
    assert kinds == {"bigrams": np.float32, "large numbers": np.float64}


def test_remainders_are_those_of_a_division() -> None:
    random = np.random.default_rng(3)
    for bucket in (1 << 12, 10_000, 2_000_000, 2**31 - 1):
        hashes = random.integers(-(2**31), 2**31, 20_001).astype(np.int32)
        hashes[:6] = (-(2**31), 2**31 - 1, -1, 0, 0, 1)
        pairs = hashes[:-1].astype(np.int64).astype(np.uint64) * np.uint64(116049371)
        pairs += hashes[1:].astype(np.int64).astype(np.uint64)
        rows = np.empty(len(hashes) - 1, np.int32)
        add_pairs(hashes, features_of_no_words(bucket), rows)
        assert rows.tolist() == (pairs % np.uint64(bucket)).tolist()


def test_words_end_where_their_bytes_say(tmp_path: Path) -> None:
    """Words of any length at any place of the 64 bytes, and of the 2,048, that are looked at together."""
    path = write_random_model(tmp_path / "m.bin", Shape(2, 2, 4))
    scorer = FastTextScorer.read(path, "__label__a")
    library = fasttext.load_model(str(path))
    texts = ["x" * before + space + "mill" * size for before in range(66) for size in (1, 4, 17) for space in " \0"]
    texts += ["wheat " * 341 + "y" * size + " flour bread" for size in range(1, 16)]
    texts += ["a b c 1 2 3 " * 700 + "z" * size + " flour" for size in range(3)]  # as many words as 64 bytes can have
    for text, score in zip(texts, scorer.score(texts), strict=True):
        labels, chances = library.predict(text, k=-1, threshold=-1)
        assert abs(dict(zip(labels, chances, strict=True))["__label__a"] - score) < 1e-6, text


def test_words_are_found_wherever_there_was_room_for_them(tmp_path: Path) -> None:
    """In their bucket, in the one beside it, or, where both are full, among the slots."""
    words = [f"{chr(97 + number % 26)}{number * 7919 % 4000}{'mill' * (number % 4)}" for number in range(4000)]
    path = write_random_model(tmp_path / "m.bin", Shape(1, words=tuple(word.encode() for word in words)))
    features = FastTextScorer.read(path, "__label__a").features
    has_more = (features.buckets[:, 2:] >> np.uint64(31) & np.uint64(1)).sum(axis=0)
    assert has_more[0] > has_more[1] > 0
    expected = list(range(1, len(words) + 1))
    texts = JoinedTexts.join([" ".join(f"{word} {word}x" for word in words).encode()])
    max_words, max_features = features.max_counts(int(texts.sizes[0]))
    rows = np.empty(max_features, np.int32)
    hashes = np.empty(max_words, np.int32)
    count = find_features(texts, 0, int(texts.sizes[0]), features, WordGroup.new(), hashes, rows)
    assert rows[:count].tolist() == [*expected, features.end_row]


def test_no_kernel_of_scores_imports_scipys_linear_algebra(tmp_path: Path) -> None:
    """It takes each worker a tenth of a second, as long as 20 MB of text."""
    path = write_random_model(tmp_path / "m.bin", Shape())
    code = (
        "import sys; from pathlib import Path; from preprocessing.scoring.fasttext_scores import FastTextScorer\n"
        f"FastTextScorer.read(Path({str(path)!r}), '__label__a').score(['the mill'])\n"
        "print('scipy.linalg' in sys.modules)"
    )
    FastTextScorer.read(path, "__label__a").score(["the mill"])  # compiles what is not in the cache
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def test_batches_change_nothing(tmp_path: Path) -> None:
    scorer = FastTextScorer.read(write_random_model(tmp_path / "m.bin", Shape(3, 2, 4)), "__label__b")
    texts = texts_of_all_scripts(500)
    alone = np.concatenate([scorer.score([text]) for text in texts])
    assert scorer.score(texts).tobytes() == alone.tobytes()
    assert scorer.score([]).tolist() == []


def test_products_of_a_large_model_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_random_model(tmp_path / "m.bin", SHAPES["labels"])
    texts = texts_of_all_scripts(100)
    label = SHAPES["labels"].labels[2]
    expected = FastTextScorer.read(path, label).score(texts).tobytes()
    keep_products(path, read_fasttext(path), "5eed", label)
    assert not (tmp_path / "cache").exists()  # small ones take no time
    monkeypatch.setattr(fasttext_products, "_LARGE", 1)
    for number in range(10):
        keep_products(path, read_fasttext(path), f"5eed{number}", label)
    (*_, newest) = sorted((tmp_path / "cache").rglob("*.npy"), key=lambda file: file.stat().st_mtime_ns)
    assert len([*newest.parent.iterdir()]) == 8
    with monkeypatch.context() as patch:
        patch.delattr(fasttext_products, "_multiply")
        assert FastTextScorer.read(path, label, "5eed9").score(texts).tobytes() == expected
    newest.write_bytes(newest.read_bytes()[:-1])
    assert FastTextScorer.read(path, label, "5eed9").score(texts).tobytes() == expected
