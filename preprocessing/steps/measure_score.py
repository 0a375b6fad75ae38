"""Step: score texts by a measure that recipes know, such as their words; its limits then read no text."""

from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import sha256

import numpy as np

from gristmill.arguments import one_of
from gristmill.errors import require
from preprocessing.quality.measures import MEASURES, TextMeasures
from preprocessing.quality.words import WordSplitter
from preprocessing.steps.scores import ModelScore

_VERSION = 1  # of all measures
_HELD_CHARACTERS = 1 << 21  # of texts whose words are kept for the next measure


@dataclass(frozen=True)
class MeasureScore(ModelScore):
    """Score texts by one of MEASURES, as the rule of a recipe that has its name."""

    measure: str

    @classmethod
    def of(cls, score: str, measure: str) -> "MeasureScore":
        """Return the step of a measure. Raises UsageError if there is none of this name."""
        require(measure in MEASURES, f"[scores.{score}]: unknown measure {measure!r}: {one_of(measure, MEASURES)}")
        return cls(score, sha256(f"{measure} {_VERSION}".encode()).hexdigest(), measure)

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("unicode",)

    def describe(self) -> str:
        return f"{self.fact} {self.measure}"

    def compute(self, texts: tuple[str, ...]) -> np.ndarray:
        measure = MEASURES[self.measure]
        return np.array([measure(of_text) for of_text in _measures_of(texts)], np.float32)


def _measures_of(texts: tuple[str, ...]) -> list[TextMeasures]:
    """Return the measures of texts; those of short ones stay for the next step, which may need the same words."""
    if sum(map(len, texts)) > _HELD_CHARACTERS:
        return _new_measures(texts)
    return _held_measures(texts)


@lru_cache(maxsize=1)
def _held_measures(texts: tuple[str, ...]) -> list[TextMeasures]:
    return _new_measures(texts)


def _new_measures(texts: tuple[str, ...]) -> list[TextMeasures]:
    splitter = _splitter()
    return [TextMeasures(text, splitter) for text in texts]


@cache
def _splitter() -> WordSplitter:
    """Return the splitter of this process, which remembers words."""
    return WordSplitter()
