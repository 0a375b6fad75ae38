"""Languages of a recipe: a table of limits and stop words, which language a document is in, and its words.

The table has a line of JSON for each language: `language`, its ISO 639-3 code and script (deu_Latn), and values by
name; with `code`, the shorter code that fastText's model calls it by, which several scripts of a language share.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gristmill.errors import UsageError
from preprocessing.quality.language_identifier import LANGUAGE_LIBRARIES, language_identifier
from preprocessing.quality.pieces import hash_words
from preprocessing.quality.scripts import script_shares
from preprocessing.quality.words import ENGLISH, WordRules, WordSplitter, split_piece

SEGMENTERS = ("icu4py", "kiwipiepy", "kiwipiepy_model")  # distributions whose versions decide what the words are
_SCRIPTS = {  # of a table's names, in scripts.SCRIPTS
    "Latn": ("latin",), "Cyrl": ("cyrillic",), "Grek": ("greek",), "Arab": ("arabic",), "Hebr": ("hebrew",),
    "Deva": ("devanagari",), "Thai": ("thai",), "Hang": ("hangul",), "Hani": ("han",), "Jpan": ("kana", "han"),
}  # fmt: skip

# Letters of scripts without spaces, and of India and Korea (where the language of a text is another):
_OF_SEGMENTER = re.compile(
    "[\u0900-\u0dff\u0e00-\u109f\u1100-\u11ff\u1780-\u17ff\u3040-\u30ff\u3130-\u318f\u3400-\u9fff\uac00-\ud7af"
    "\uf900-\ufaff\U00020000-\U0003ffff]"
)
_TSHEG = "\u0f0b\u0f0c"  # the dots that end a syllable of Tibetan: FineWeb2's stop words have them
_HANGUL = re.compile("[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]")
_KEEPING_HYPHENS = frozenset(["deu", "spa", "ell", "nld", "swe", "dan", "nob", "nno", "hun", "ron", "por", "fin"])
_KEEPING_SLASHES = frozenset(["nld", "hun", "ron"])
_ELIDING = frozenset(["fra", "ita", "cat", "lij"])


@dataclass(frozen=True)
class Language:
    """A line of a table: its name, such as deu_Latn, the values of a language by name, and its stop words."""

    name: str
    code: str
    values: Mapping[str, Any]

    def number(self, name: str) -> float:
        """Return a value."""
        return float(self.values[name])


@dataclass(frozen=True)
class Languages:
    """Section languages of a recipe.

    Attributes:
        path: The table.
        field: The field of a record that names its language; empty: fastText's model finds it.
        score_field: The field with the probability of that; empty: it is certain.
        min_score: The probability that a document must have, or the name of a value in the table.
        stop_words: The name of the value in the table that is a list of stop words.
    """

    path: Path
    field: str = ""
    score_field: str = ""
    min_score: float | str = 0.0
    stop_words: str = ""

    @property
    def libraries(self) -> tuple[str, ...]:
        """Return the distributions whose versions decide what language and words are found."""
        if self.field:
            return SEGMENTERS
        return (*SEGMENTERS, *LANGUAGE_LIBRARIES)

    def find(self, text: str, label: str = "", score: float = 1.0) -> tuple[Language | None, str, float]:
        """Return the language of a document, None if the table has not, its name, and how probable it is.

        `label` and `score` are what its record says; without a field they are found.
        """
        if not self.field:
            label, score = language_identifier().identify(text)
        table = read_table(self.path)
        language = table.find(label, text, is_of_model=not self.field)
        if language is None:
            return None, label, score
        return language, language.name, score

    def min_score_for(self, language: Language) -> float:
        """Return the probability that a document in a language must have."""
        if isinstance(self.min_score, str):
            return language.number(self.min_score)
        return self.min_score

    def stop_hashes(self, language: Language) -> NDArray[np.uint64] | None:
        """Return the hashes of the stop words of a language; None: the English ones that rules know."""
        if not self.stop_words:
            return None
        return _hashes(tuple(language.values[self.stop_words]))


class LanguageTable:
    """A table of languages, looked up by name, by ISO 639-3 code, or by the code of fastText's model."""

    def __init__(self, languages: list[Language]) -> None:
        self.languages = languages
        self._named = {language.name: language for language in languages}
        self._by_iso: dict[str, list[Language]] = {}
        self._by_code: dict[str, list[Language]] = {}
        for language in languages:
            iso_code = language.name.partition("_")[0]
            self._by_iso.setdefault(iso_code, []).append(language)
            self._by_code.setdefault(language.code, []).append(language)

    def find(self, label: str, text: str, is_of_model: bool = False) -> Language | None:
        """Return the language of a label such as deu_Latn, deu, de or de-AT; of several scripts that of the text.

        fastText's model calls Alemannic als, which in ISO 639-3 is Albanian: its codes come first where it gave them.
        """
        if label in self._named:
            return self._named[label]
        code = label.replace("_", "-").partition("-")[0].lower()
        if not code:
            return None
        of_iso = self._by_iso.get(code, [])
        of_model = self._by_code.get(code, [])
        candidates = of_iso or of_model
        if is_of_model:
            candidates = of_model or of_iso
        if not candidates:
            return None
        if len(candidates) == 1:
            return candidates[0]
        shares = script_shares(text)
        return max(candidates, key=lambda language: (_share_of_script(language.name, shares), language.name))


def _share_of_script(name: str, shares: Mapping[str, float]) -> float:
    """Return the share of a language's script in the letters of a text; of others what no known script has."""
    scripts = _SCRIPTS.get(name.partition("_")[2])
    if scripts is None:
        return 1 - sum(shares.values())
    return sum(shares[script] for script in scripts)


def read_table(path: Path) -> LanguageTable:
    """Return a table of languages. Raises UsageError if the file is none."""
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise UsageError(f"{path}: expected a table of languages, got {error.strerror}; check the path") from error


@lru_cache(maxsize=4)
def _read(path: Path, _: int) -> LanguageTable:
    languages = list[Language]()
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            values = msgspec.json.decode(line, type=dict[str, Any])
            languages.append(Language(str(values["language"]), str(values.get("code", "")), values))
        except (msgspec.DecodeError, KeyError) as error:
            raise UsageError(
                f"{path} line {number}: expected an object such as "
                f'{{"language": "deu_Latn", "code": "de", "stop_words": ["der", "und"]}}, got: {error}'
            ) from error
    if not languages:
        raise UsageError(f"{path}: expected a line for each language, got none")
    return LanguageTable(languages)


def check_segmenter() -> None:
    """Raise UsageError unless the libraries that split texts of any language into words are installed."""
    for module in ("icu4py", "kiwipiepy"):
        if find_spec(module) is None:
            raise UsageError(f"a recipe with languages needs {module}: pip install 'gristmill[language]'")


class LanguageSplitter(WordSplitter):
    """Splits texts of any language, each by the rules of its language, which splitters remember pieces for."""

    def __init__(self) -> None:
        super().__init__(split_any)
        self._splitters = {WordRules(): WordSplitter(split_any), ENGLISH: WordSplitter()}
        self._of_korean = WordSplitter(split_korean)

    def of(self, language: str) -> WordSplitter:
        if language.startswith("kor"):
            return self._of_korean
        rules = rules_of(language)
        if rules not in self._splitters:
            self._splitters[rules] = WordSplitter(partial(split_any, rules=rules))
        return self._splitters[rules]


def rules_of(language: str) -> WordRules:
    """Return how texts in a language with spaces are split.

    >>> rules_of("deu_Latn").keeps_hyphens, rules_of("fra_Latn").elides, rules_of("pol_Latn") == WordRules()
    (True, True, True)
    """
    code = language.partition("_")[0]
    if code == "eng":
        return ENGLISH
    return WordRules(
        keeps_hyphens=code in _KEEPING_HYPHENS, keeps_slashes=code in _KEEPING_SLASHES, elides=code in _ELIDING
    )


def split_any(piece: str, rules: WordRules = WordRules()) -> list[str]:
    """Return the words of a text without spaces in any language, some of which have `rules` of their own.

    In scripts without spaces, and in those of India, they are what ICU's dictionaries and Unicode's rules
    find.

    >>> split_any("磨坊的水车慢慢地转着。"), split_any("(don't..."), split_any("/usr/bin:")
    (['磨坊', '的', '水', '车', '慢慢地', '转', '着', '。'], ['(', "don't", '...'], ['/usr', '/', 'bin', ':'])
    """
    if not _OF_SEGMENTER.search(piece):
        return split_piece(piece, rules)
    words = list[str]()
    for word in _breaker()(piece, "und"):
        is_of_last = word == "." and words and words[-1].strip(".") == ""  # an ellipsis is one word, as in English
        if is_of_last or (word in _TSHEG and words):
            words[-1] += word
        elif not word.isspace():
            words.append(word)
    return words


def split_korean(piece: str) -> list[str]:
    """Return the morphemes of a Korean text without spaces, as FineWeb2's stop words are: a word and its particles.

    >>> split_korean("강가에서"), split_korean("밀가루를"), split_korean("Linux")
    (['강가', '에서'], ['밀가루', '를'], ['Linux'])
    """
    if not _HANGUL.search(piece):
        return split_any(piece)
    words = list[str]()
    for token in _kiwi().tokenize(piece):
        word = piece[token.start : token.end]
        if word:  # none for a particle that is a part of the syllable before it
            words.append(word)
    return words or [piece]


@cache
def _kiwi() -> Any:
    from kiwipiepy import Kiwi  # here, as its model takes a second to load, and 300 MB

    return Kiwi(num_workers=1, load_multi_dict=False)  # names of several words change no decision of a recipe


@cache
def _breaker() -> Any:
    from icu4py.breakers import WordBreaker

    return WordBreaker


def number_of(value: Any) -> float:
    """Return the number that a field of a record has; 0 if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


@lru_cache(maxsize=1 << 12)
def _hashes(words: tuple[str, ...]) -> NDArray[np.uint64]:
    return hash_words(words)
