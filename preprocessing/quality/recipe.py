"""Recipes: rules in the order in which they look at a document, from a TOML file of the package or of the user."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gristmill.arguments import one_of
from gristmill.errors import UsageError
from preprocessing.quality.lines import LineRules
from preprocessing.quality.measures import MEASURES, UNBOUNDED, TextMeasures
from preprocessing.quality.personal import PersonalRules
from preprocessing.quality.words import WordSplitter

_SHIPPED = Path(__file__).with_name("recipes")
_REWRITES = {"lines": LineRules, "personal": PersonalRules}


@dataclass(frozen=True)
class Bounds:
    """A rule: the least and the most that a measure of a document may be."""

    name: str
    least: float = -math.inf
    most: float = math.inf

    def allows(self, value: float) -> bool:
        return self.least <= value <= self.most


@dataclass(frozen=True)
class Verdict:
    """What rules say of a document: the text to keep, or the rule that it fails, with the value of its measure."""

    text: str
    rule: str = ""
    value: float = 0.0


Step = Bounds | LineRules | PersonalRules


@dataclass(frozen=True)
class Recipe:
    """Steps in their order: each compares a measure of the text, or rewrites it for those that follow."""

    name: str
    steps: tuple[Step, ...]

    def judge(self, text: str, splitter: WordSplitter) -> Verdict:
        """Apply the steps until one removes the document."""
        measures = TextMeasures(text, splitter)
        for step in self.steps:
            if isinstance(step, Bounds):
                if not step.allows(value := MEASURES[step.name](measures)):
                    return Verdict(measures.text, step.name, float(value))
            elif (changed := step.rewrite(measures.text)) != measures.text:
                measures = TextMeasures(changed, splitter)
        return Verdict(measures.text)


def shipped_recipes() -> list[str]:
    """Names of the recipes of the package."""
    return sorted(path.stem for path in _SHIPPED.glob("*.toml"))


def load_recipe(name: str) -> Recipe:
    """A recipe of the package by its name, or of a TOML file. Raises UsageError that names the file and the key."""
    return parse_recipe(read_recipe(name), name)


def read_recipe(name: str) -> str:
    """The TOML of a recipe. Raises UsageError if there is none of that name."""
    path = Path(name) if name.endswith(".toml") else _SHIPPED / f"{name}.toml"
    if not name.endswith(".toml") and name not in shipped_recipes():
        raise UsageError(f"recipe {name!r}: expected a file FILE.toml or a name; {one_of(name, shipped_recipes())}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"recipe {name}: expected a TOML file that can be read, got {error}") from error


def parse_recipe(content: str, name: str) -> Recipe:
    """A recipe from TOML; `name` is for messages. Raises UsageError."""
    try:
        table = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"recipe {name}: expected TOML, got {error}") from error
    if not table:
        raise UsageError(f"recipe {name}: expected rules such as words.min = 50, got none")
    return Recipe(name, tuple(_step(name, key, value) for key, value in table.items()))


def _step(recipe: str, key: str, value: Any) -> Step:
    known = [*MEASURES, *_REWRITES]
    if key not in known:
        raise UsageError(f"recipe {recipe}: unknown rule {key!r}; {one_of(key, known)}")
    if not isinstance(value, dict):
        raise UsageError(f"recipe {recipe}: {key}: expected numbers such as {key}.max = 1, got {value!r}")
    return _rewrite(recipe, key, value) if key in _REWRITES else _bounds(recipe, key, value)


def _bounds(recipe: str, key: str, value: Mapping[str, Any]) -> Bounds:
    most = math.inf if key in UNBOUNDED else 1.0
    for name, number in value.items():
        if name not in ("min", "max"):
            raise UsageError(f"recipe {recipe}: {key}.{name}: expected {key}.min or {key}.max")
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= most:
            limits = "a number of 0 or more" if key in UNBOUNDED else "a share from 0 to 1"
            raise UsageError(f"recipe {recipe}: {key}.{name}: expected {limits}, got {number!r}")
    bounds = Bounds(key, value.get("min", -math.inf), value.get("max", math.inf))
    if not value or bounds.least > bounds.most:
        raise UsageError(f"recipe {recipe}: {key}: expected min, max or both, min up to max, got {dict(value)}")
    return bounds


def _rewrite(recipe: str, key: str, value: Mapping[str, Any]) -> LineRules | PersonalRules:
    kinds: dict[str, type] = {field.name: type(field.default) for field in fields(_REWRITES[key])}
    for name, given in value.items():
        if name not in kinds:
            raise UsageError(f"recipe {recipe}: {key}: unknown rule {name!r}; {one_of(name, list(kinds))}")
        if type(given) is not kinds[name] or (isinstance(given, int) and given < 0):
            wanted = "true or false" if kinds[name] is bool else "a whole number of 0 or more"
            raise UsageError(f"recipe {recipe}: {key}.{name}: expected {wanted}, got {given!r}")
    return _REWRITES[key](**value)
