"""Recipes: rules in the order in which they look at a document, from a TOML file of the package or of the user.

Rules compare a measure of the text, or rewrite it: lines are left out, as by C4; personal data is replaced by
nobody's.
"""

import math
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill.arguments import one_of
from gristmill.errors import UsageError
from gristmill.wording import message_of
from preprocessing.quality.bounds import Bounds, LanguageBounds, LanguageRule, UrlList, WordList
from preprocessing.quality.language_identifier import LANGUAGE_LIBRARIES, check_language, language_identifier
from preprocessing.quality.languages import (
    Languages,
    LanguageSplitter,
    check_segmenter,
    number_of,
    read_table,
)
from preprocessing.quality.lists import read_list, read_urls
from preprocessing.quality.measures import (
    MEASURES,
    UNBOUNDED,
    TextMeasures,
)
from preprocessing.quality.personal import REPLACEMENTS, PersonalRules
from preprocessing.quality.rewriting import LineRules
from preprocessing.quality.words import WordSplitter

_SHIPPED = Path(__file__).with_name("recipes")
_FURTHER = ("language", "listed_words", "listed_urls", "allowed_urls")
LANGUAGES = "languages"  # section of a table of languages
LANGUAGE = "language"  # reason: a document in no language of the table
RULES = frozenset([*MEASURES, *_FURTHER])  # that remove documents
_LATER = re.compile(r"(?<=^lines)_[2-9]$")
_EXAMPLES = {  # of rules that have other values than numbers
    "languages": "languages = { table = 'languages.jsonl' }",
    "lines": "lines = { min_words = 3 }", "personal": "personal = { mail = true, ip = true }",
    "language": "language = { allow = ['en'], min_score = 0.65 }",
    "listed_words": "listed_words = { file = 'words.txt', max = 0.01 }",
    "listed_urls": "listed_urls = { file = 'domains.txt' }",
    "allowed_urls": "allowed_urls = { file = 'domains.txt' }",
}  # fmt: skip


@dataclass(frozen=True)
class RuleDecision:
    """Decision of the rules on a document: the text to keep, or the rule that it fails, with its measure's value.

    `replaced`: how many mail addresses, card numbers, … of the text that is kept were replaced, by kind.
    """

    text: str
    rule: str = ""
    value: float = 0.0
    detail: str = ""
    replaced: Mapping[str, int] = field(default_factory=dict)


_REWRITES = {"lines": LineRules, "personal": PersonalRules}
Step = Bounds | LineRules | PersonalRules
Lists = Mapping[str, Path]  # rule → the file of its list


@dataclass(frozen=True)
class Recipe:
    """Steps in their order: each compares a measure of the text, or rewrites it for those that follow."""

    steps: tuple[Step, ...]
    languages: Languages | None = None

    def judge(
        self, text: str, splitter: WordSplitter, url: str = "", label: str = "", score: float = 1.0
    ) -> RuleDecision:
        """Apply the steps until one removes the document; `url` is its address, for lists of these.

        `label` and `score` are what its record says of its language, if the recipe asks for that.
        """
        steps, stop_hashes, name, score = self.rules_for(text, label, score)
        if steps is None:
            return RuleDecision(text, LANGUAGE, score, name)
        measures = TextMeasures(text, splitter.of(name), url, stop_hashes)
        replaced = Counter[str]()
        for step in steps:
            if isinstance(step, Bounds):
                value = step.value(measures)
                if not step.allows(value):
                    return RuleDecision(measures.text, step.name, value, step.detail(measures) or name)
                continue
            changed, counts = step.rewrite(measures.text)
            replaced.update(counts)
            if changed != measures.text:
                measures = measures.of(changed)
        return RuleDecision(measures.text, replaced=replaced)

    def rewrite(self, text: str, label: str = "", score: float = 1.0) -> str:
        """Return what the text becomes if no rule removes the document."""
        steps, *_ = self.rules_for(text, label, score)
        if steps is None:
            steps = self.steps
        for step in steps:
            if not isinstance(step, Bounds):
                text, _ = step.rewrite(text)
        return text

    def rules_for(
        self, text: str, label: str = "", score: float = 1.0
    ) -> tuple[tuple[Step, ...] | None, NDArray[np.uint64] | None, str, float]:
        """Return the steps for a document's language, the hashes of its stop words, its name, and its probability.

        Without steps the document goes: the table has not its language, or that is too improbable.
        """
        if self.languages is None:
            return self.steps, None, "", 1.0
        language, name, score = self.languages.find(text, label, score)
        if language is None or score < self.languages.min_score_for(language):
            return None, None, name, score
        return _steps_of(self.steps, language.name, self.languages), self.languages.stop_hashes(language), name, score

    def language_of(self, value_of: Callable[[str], Any]) -> tuple[str, float]:
        """Return what a record says of its language, and the probability of that; `value_of` reads a field."""
        label = ""
        score = 1.0
        if self.languages and self.languages.field:
            label = str(value_of(self.languages.field) or "")
        if self.languages and self.languages.score_field:
            score = number_of(value_of(self.languages.score_field))
        return label, score

    def new_splitter(self) -> WordSplitter:
        """Return a splitter into words, as the rules count them."""
        if self.languages is None:
            return WordSplitter()
        return LanguageSplitter()

    @property
    def url_field(self) -> str:
        """Return the field with a document's address, if a rule looks at it."""
        return next((step.field for step in self.steps if isinstance(step, UrlList)), "")

    @property
    def replaces(self) -> list[str]:
        """Return the kinds of personal data that are replaced: mail, card, …"""
        rules = [step for step in self.steps if isinstance(step, PersonalRules)]
        return [kind for kind in REPLACEMENTS if any(getattr(step, kind) for step in rules)]

    @property
    def lists(self) -> Lists:
        """Return the files of lists, by rule."""
        paths = dict[str, Path]()
        for step in self.steps:
            if isinstance(step, WordList | UrlList):
                paths[step.name] = step.path
        if self.languages:
            paths[LANGUAGES] = self.languages.path
        return paths

    @property
    def libraries(self) -> tuple[str, ...]:
        """Return the distributions whose versions decide what a rule finds."""
        named = list[str]()
        if any(isinstance(step, LanguageRule) for step in self.steps):
            named += LANGUAGE_LIBRARIES
        for step in self.steps:
            if isinstance(step, PersonalRules):
                named += step.libraries
        if self.languages:
            named = list(dict.fromkeys([*named, *self.languages.libraries]))
        return tuple(named)


@lru_cache(maxsize=1 << 12)
def _steps_of(steps: tuple[Step, ...], name: str, languages: Languages) -> tuple[Step, ...]:
    """Return the steps for documents in a language of the table."""
    language = read_table(languages.path).find(name, "")
    assert language is not None, name
    own_steps = list[Step]()
    for step in steps:
        if isinstance(step, Bounds):
            step = step.of(language)
        own_steps.append(step)
    return tuple(own_steps)


def shipped_recipes() -> list[str]:
    """Return the names of the recipes of the package."""
    return sorted(path.stem for path in _SHIPPED.glob("*.toml"))


def load_recipe(name: str) -> Recipe:
    """Return a recipe of the package by its name, or of a TOML file.

    Raises UsageError that names the file and the key.
    """
    return parse_recipe(read_recipe(name), name)


def read_recipe(name: str) -> str:
    """Return the TOML of a recipe. Raises UsageError if there is none of that name."""
    path = Path(name)
    if not name.endswith(".toml"):
        path = _SHIPPED / f"{name}.toml"
        if name not in shipped_recipes():
            raise UsageError(f"recipe {name!r}: expected a file FILE.toml or a name; {one_of(name, shipped_recipes())}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fault = str(error)
        if isinstance(error, OSError):
            fault = str(error.strerror)
        raise UsageError(
            f"recipe {name}: expected a TOML file that can be read, got: {fault}; check the path"
        ) from error


def parse_recipe(content: str, name: str, lists: Lists | None = None) -> Recipe:
    """Return a recipe from TOML; `name` is that of its file, or of the package. Raises UsageError.

    `lists`: where its lists are; by default as the TOML says, from the folder of the file.
    """
    try:
        table = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"recipe {name}: invalid TOML: {message_of(error)}") from error
    if not table:
        raise UsageError(f"recipe {name}: expected rules such as words.min = 50, got none")
    languages: Languages | None = None
    if LANGUAGES in table:
        languages = _languages(name, table.pop(LANGUAGES), lists)
    steps = [_step(name, key, value, lists, languages) for key, value in table.items()]
    return Recipe(tuple(steps), languages)


def _languages(recipe: str, value: Any, lists: Lists | None) -> Languages:
    """Return the section languages. Raises UsageError."""
    known = [field.name for field in fields(Languages)]
    known[0] = "table"
    if not isinstance(value, dict) or not isinstance(value.get("table"), str):
        raise UsageError(f"recipe {recipe}: languages: expected {_EXAMPLES[LANGUAGES]}, got {value!r}")
    for name, given in value.items():
        if name not in known:
            raise UsageError(f"recipe {recipe}: languages: unknown key {name!r}; {one_of(name, known)}")
        kinds: tuple[type, ...] = (str,)
        if name == "min_score":
            kinds = (str, int, float)
        if not isinstance(given, kinds) or isinstance(given, bool):
            raise UsageError(f"recipe {recipe}: languages.{name}: expected {_EXAMPLES[LANGUAGES]}, got {given!r}")
    path = _folder_of(recipe) / value["table"]
    if lists:
        path = lists[LANGUAGES]
    given = {name: item for name, item in value.items() if name != "table"}
    languages = Languages(path, **given)
    check_segmenter()
    if not languages.field:
        check_language()
    read_table(path)
    if isinstance(languages.min_score, str):
        _check_column(recipe, "languages.min_score", languages.min_score, languages, int | float)
    if languages.stop_words:
        _check_column(recipe, "languages.stop_words", languages.stop_words, languages, list)
    return languages


def _check_column(recipe: str, key: str, name: str, languages: Languages, kind: Any) -> None:
    """Raise UsageError unless each language of the table has a value of this name and kind."""
    for language in read_table(languages.path).languages:
        if not isinstance(language.values.get(name), kind):
            raise UsageError(
                f"recipe {recipe}: {key}: expected a value {name!r} of each language in {languages.path}, got "
                f"{language.values.get(name)!r} of {language.name}"
            )


def _folder_of(recipe: str) -> Path:
    """Return the folder of the files that a recipe names."""
    if recipe.endswith(".toml"):
        return Path(recipe).parent
    return _SHIPPED


def _step(recipe: str, key: str, value: Any, lists: Lists | None, languages: Languages | None) -> Step:
    known = [*MEASURES, *_REWRITES, *_FURTHER]
    if key not in known and _base(key) != "lines":
        raise UsageError(f"recipe {recipe}: unknown rule {key!r}; {one_of(key, known)}")
    if not isinstance(value, dict):
        example = _EXAMPLES.get(key, f"{key}.max = 1")
        raise UsageError(f"recipe {recipe}: {key}: expected a table such as {example}, got {value!r}")
    if key == "language":
        return _language(recipe, value)
    if key in _FURTHER:
        return _list(recipe, key, value, lists)
    if _base(key) in _REWRITES:
        return _rewrite(recipe, key, value)
    return _bounds(recipe, key, value, languages)


def _reject_others(recipe: str, key: str, value: Mapping[str, Any], known: tuple[str, str]) -> None:
    others = sorted(value.keys() - {*known})
    if others:
        raise UsageError(f"recipe {recipe}: {key}.{others[0]}: expected {key}.{known[0]} or {key}.{known[1]}")


def _language(recipe: str, value: Mapping[str, Any]) -> LanguageRule:
    allow = value.get("allow")
    min_score = value.get("min_score", 0.0)
    if not isinstance(allow, list) or not allow or not all(isinstance(code, str) for code in allow):
        raise UsageError(f"recipe {recipe}: language.allow: expected codes of languages such as ['en'], got {allow!r}")
    _reject_others(recipe, "language", value, ("allow", "min_score"))
    if isinstance(min_score, bool) or not isinstance(min_score, int | float) or not 0 <= min_score <= 1:
        raise UsageError(f"recipe {recipe}: language.min_score: expected a probability from 0 to 1, got {min_score!r}")
    check_language()
    known = set(language_identifier().labels)
    strange = sorted(set(allow) - known)
    if strange:
        raise UsageError(f"recipe {recipe}: language.allow: unknown code {strange[0]!r}; {one_of(strange[0], known)}")
    return LanguageRule("language", max(min_score, sys.float_info.min), allow=tuple(allow))


def _list(recipe: str, key: str, value: Mapping[str, Any], lists: Lists | None) -> WordList | UrlList:
    file = value.get("file")
    extra = "max" if key == "listed_words" else "field"
    if not isinstance(file, str) or not file:
        raise UsageError(
            f"recipe {recipe}: {key}.file: expected the name of a file with one entry per line, got {file!r}"
        )
    _reject_others(recipe, key, value, ("file", extra))
    field = value.get("field", "url")
    if not isinstance(field, str) or not field:
        raise UsageError(f"recipe {recipe}: {key}.field: expected the name of a field, got {field!r}")
    if lists:
        path = lists[key]
    else:
        path = _folder_of(recipe) / file
        _check_list(recipe, key, path)
    if key == "listed_urls":
        return UrlList(key, max=0.0, path=path, field=field)
    if key == "allowed_urls":
        return UrlList(key, min=1.0, path=path, field=field)
    bounds = _bounds(recipe, key, {"max": value.get("max", 0)})
    return WordList(key, max=bounds.max, path=path)


def _check_list(recipe: str, key: str, path: Path) -> None:
    """Raise UsageError unless a list can be read, and has one word an entry if it is of words."""
    try:
        if key != "listed_words":
            read_urls(path)
            return
        entries = read_list(path)
    except UsageError as error:
        raise UsageError(f"recipe {recipe}: {key}.file: {error}") from error
    for entry in sorted(entries):
        if len(entry.split()) > 1:
            raise UsageError(f"recipe {recipe}: {key}.file: expected one word an entry in {path}, got {entry!r}")


def _bounds(recipe: str, key: str, value: Mapping[str, Any], languages: Languages | None = None) -> Bounds:
    largest = math.inf if key in UNBOUNDED else 1.0
    _reject_others(recipe, key, value, ("min", "max"))
    named = dict[str, str]()  # columns of the table of languages
    rest = dict[str, Any]()
    for name, given in value.items():
        if isinstance(given, str) and languages:
            _check_column(recipe, f"{key}.{name}", given, languages, int | float)
            named[name] = given
        else:
            rest[name] = given
    if named:
        fixed = Bounds(key)
        if rest:
            fixed = _bounds(recipe, key, rest)
        return LanguageBounds(key, fixed.min, fixed.max, tuple(named.items()))
    for name, number in value.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= largest:
            limits = "a share from 0 to 1"
            if key in UNBOUNDED:
                limits = "a number of 0 or more"
            raise UsageError(f"recipe {recipe}: {key}.{name}: expected {limits}, got {number!r}")
    bounds = Bounds(key, value.get("min", -math.inf), value.get("max", math.inf))
    if not value or bounds.min > bounds.max:
        raise UsageError(f"recipe {recipe}: {key}: expected min, max or both, min up to max, got {dict(value)}")
    return bounds


def _rewrite(recipe: str, key: str, value: Mapping[str, Any]) -> LineRules | PersonalRules:
    kinds = dict[str, type]()
    for rule in fields(_REWRITES[_base(key)]):
        kinds[rule.name] = type(rule.default)
    for name, given in value.items():
        if name not in kinds:
            raise UsageError(f"recipe {recipe}: {key}: unknown rule {name!r}; {one_of(name, list(kinds))}")
        if type(given) is not kinds[name] or (isinstance(given, int) and given < 0):
            expected = {bool: "true or false", str: "a text"}.get(kinds[name], "a whole number of 0 or more")
            raise UsageError(f"recipe {recipe}: {key}.{name}: expected {expected}, got {given!r}")
    try:
        return _REWRITES[_base(key)](**value)
    except UsageError as error:
        raise UsageError(f"recipe {recipe}: {error}") from error


def _base(key: str) -> str:
    """Return the section that a key such as lines_2 is one of: rules for lines may come several times."""
    return _LATER.sub("", key)
