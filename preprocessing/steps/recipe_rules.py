"""Step: the rules of a recipe of quality, as filter_quality applies them; the reason is the first rule that fails."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Self

from gristmill.steps import Batch, DocumentStep, Outcome
from preprocessing.quality.recipe import Recipe, RuleDecision, parse_recipe, read_recipe
from preprocessing.quality.words import WordSplitter

REPLACED = "replaced"  # begins the names of facts: how many mail addresses, card numbers, … were replaced


@dataclass(frozen=True)
class RecipeRules(DocumentStep):
    """Apply a recipe, given as the content of its TOML, `name`, and the files of the lists that it names."""

    name = "recipe"
    content: str
    lists: Mapping[str, Path] = field(default_factory=dict)

    @classmethod
    def of(cls, recipe: str) -> Self:
        """Return the step of a recipe of the package, or of a TOML file. Raises UsageError if it is none."""
        content = read_recipe(recipe)
        return cls(content, dict(parse_recipe(content, recipe).lists))

    @property
    def version(self) -> int:
        return 7

    @property
    def makes(self) -> Mapping[str, str]:
        recipe = parse_recipe(self.content, "of the run", self.lists)
        return {f"{REPLACED}_{kind}": "int64" for kind in recipe.replaces}

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("unicode", *parse_recipe(self.content, "of the run", self.lists).libraries)

    def apply(self, batch: Batch) -> Outcome:
        recipe, splitter = _parsed(self.content, tuple(sorted(self.lists.items())))
        urls = batch.column(recipe.url_field) if recipe.url_field else [""] * len(batch)
        decisions = list[RuleDecision]()
        for number, (text, url) in enumerate(zip(batch.texts, urls, strict=True)):
            label, score = recipe.language_of(partial(batch.read_field, number))
            decisions.append(recipe.judge(text, splitter, str(url or ""), label, score))
        replaced = dict[str, list[int]]()
        for kind in recipe.replaces:
            replaced[f"{REPLACED}_{kind}"] = [decision.replaced.get(kind, 0) for decision in decisions]
        return Outcome(
            texts=[decision.text for decision in decisions],
            reasons=[decision.rule for decision in decisions],
            values=[decision.value for decision in decisions],
            details=[decision.detail for decision in decisions],
            facts=replaced,
        )

    def rewrite(self, batch: Batch) -> list[str]:
        """Return what the texts become if no rule removes the documents."""
        recipe, _ = _parsed(self.content, tuple(sorted(self.lists.items())))
        texts = list[str]()
        for number, text in enumerate(batch.texts):
            label, score = recipe.language_of(partial(batch.read_field, number))
            texts.append(recipe.rewrite(text, label, score))
        return texts


@lru_cache(maxsize=1)
def _parsed(content: str, lists: tuple[tuple[str, Path], ...]) -> tuple[Recipe, WordSplitter]:
    """Return the recipe, and a splitter that remembers words from batch to batch."""
    recipe = parse_recipe(content, "of the run", dict(lists))
    return recipe, recipe.new_splitter()
