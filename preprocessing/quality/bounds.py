"""Rules of a recipe that remove documents: each compares a measure with its limits, or a document with a list."""

import math
from dataclasses import dataclass
from pathlib import Path

from preprocessing.quality.languages import Language
from preprocessing.quality.lists import host_of, read_list, read_urls
from preprocessing.quality.measures import MEASURES, TextMeasures

_SIGNS = "\"'“”‘’«»()[]{}<>.,;:!?…*_#"


@dataclass(frozen=True)
class Bounds:
    """A rule: what a measure of a document may be, from `min` to `max`."""

    name: str
    min: float = -math.inf
    max: float = math.inf

    def value(self, measures: TextMeasures) -> float:
        return float(MEASURES[self.name](measures))

    def detail(self, measures: TextMeasures) -> str:  # noqa: ARG002
        """Return the language or domain that the value is of, where it is not of the whole text."""
        return ""

    def allows(self, value: float) -> bool:
        return self.min <= value <= self.max

    def of(self, language: Language) -> "Bounds":  # noqa: ARG002
        """Return the rule for documents in a language."""
        return self


@dataclass(frozen=True)
class LanguageBounds(Bounds):
    """A rule whose limits are values of a table of languages: `named` has the name of each, by min and max."""

    named: tuple[tuple[str, str], ...] = ()

    def of(self, language: Language) -> Bounds:
        limits = {"min": self.min, "max": self.max}
        limits |= {side: language.number(name) for side, name in self.named}
        return Bounds(self.name, **limits)


@dataclass(frozen=True)
class LanguageRule(Bounds):
    """A rule: the probability of the most likely language, or 0 if that language is not allowed."""

    allow: tuple[str, ...] = ()

    def value(self, measures: TextMeasures) -> float:
        language, score = measures.language
        if language not in self.allow:
            return 0.0
        return score

    def detail(self, measures: TextMeasures) -> str:
        return measures.language[0]


@dataclass(frozen=True)
class WordList(Bounds):
    """A rule: the share of the words that are in a list."""

    path: Path = Path()

    def value(self, measures: TextMeasures) -> float:
        words = measures.text.lower().split()
        listed = read_list(self.path)
        return sum(word.strip(_SIGNS) in listed for word in words) / max(1, len(words))


@dataclass(frozen=True)
class UrlList(Bounds):
    """A rule: 1 if the document's address is in a list, by its domain, one above it, or its beginning, else 0."""

    path: Path = Path()
    field: str = "url"

    def value(self, measures: TextMeasures) -> float:
        return float(bool(read_urls(self.path).find(measures.url)))

    def detail(self, measures: TextMeasures) -> str:
        """Return the entry of the list; of an address that is not listed the host."""
        return read_urls(self.path).find(measures.url) or host_of(measures.url)
