"""Command: what each rule of a recipe would remove from a corpus, with examples, before anything runs."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from gristmill.errors import UsageError
from gristmill.io.documents import Document
from gristmill.io.readers import read_corpus
from gristmill.wording import count_of
from preprocessing.quality.measures import TextMeasures
from preprocessing.quality.recipe import Bounds, Recipe, load_recipe
from preprocessing.quality.words import WordSplitter

_PERCENTILES = (5, 50, 95)
_FIRST = 44  # characters of an example


def preview(
    recipe: Positional[str],
    corpus: Positional[Path],
    documents: int = 1000,
    examples: int = 2,
    text_column: str = "text",
    seed: int = 1,
) -> Group:
    """Print what each rule of a recipe would remove from a sample of a corpus, and the distribution of its measure.

    A document counts under the first rule that it fails, in the recipe's order; "alone" counts all documents that fail
    a rule, whatever the other rules say. Reads the whole corpus, and writes nothing.

    Args:
        recipe: gopher, c4, fineweb, fineweb-en, or a TOML file of rules.
        corpus: A corpus folder or file.
        documents: Size of the sample, drawn at random from the whole corpus.
        examples: Maximum number of documents to show for each rule.
        text_column: The column or field that holds the text.
        seed: Seed of the sample.
    """
    rules = load_recipe(recipe)
    if documents < 1:
        raise UsageError(f"--documents {documents}: expected 1 or more")
    sample, total = _sample(corpus, documents, text_column, seed)
    if not sample:
        raise UsageError(f"{corpus} has no document to preview; give a corpus with documents")
    return _report(rules, sample, total, examples)


def _sample(corpus: Path, size: int, text_column: str, seed: int) -> tuple[list[Document], int]:
    """Return documents drawn at random, each as likely, in the order of the corpus; and how many there are."""
    chosen = list[tuple[int, Document]]()
    total = 0
    draw = random.Random(seed)
    for total, document in enumerate(read_corpus(corpus, text_column, on_malformed="skip"), 1):
        if len(chosen) < size:
            chosen.append((total, document))
            continue
        number = draw.randrange(total)
        if number < size:
            chosen[number] = (total, document)
    in_order = sorted(chosen, key=lambda pair: pair[0])
    return [document for _, document in in_order], total


@dataclass
class _Verdicts:
    """The values of each rule, the documents that it removes first, and how many others are rewritten."""

    values: dict[str, list[float]]
    first: dict[str, list[tuple[Document, float]]]
    rewritten: int = 0


def _judge(recipe: Recipe, sample: list[Document]) -> _Verdicts:
    """Apply all rules to each document of a sample."""
    names = [step.name for step in recipe.steps if isinstance(step, Bounds)]
    verdicts = _Verdicts({name: [] for name in names}, {name: [] for name in names})
    splitter = WordSplitter()
    for document in sample:
        url = str(document.value(recipe.url_field) or "") if recipe.url_field else ""
        measures = TextMeasures(document.text, splitter, url)
        is_removed = False
        for step in recipe.steps:
            if not isinstance(step, Bounds):
                changed, _ = step.rewrite(measures.text)
                if changed != measures.text:
                    measures = measures.of(changed)
                continue
            value = step.value(measures)
            verdicts.values[step.name].append(value)
            if not is_removed and not step.allows(value):
                is_removed = True
                verdicts.first[step.name].append((document, value))
        if not is_removed and measures.text != document.text:
            verdicts.rewritten += 1
    return verdicts


def _report(recipe: Recipe, sample: list[Document], total: int, examples: int) -> Group:
    """Return what the rules would remove from a sample of `total` documents, for a terminal."""
    verdicts = _judge(recipe, sample)
    table = Table("rule", box=None, pad_edge=False, collapse_padding=True)
    for name in ("keeps", "removed", "share", "alone", *(f"{p}%" for p in _PERCENTILES)):
        table.add_column(name, justify="right", no_wrap=True)
    for step in recipe.steps:
        if isinstance(step, Bounds):
            table.add_row(*_row_of_rule(step, verdicts, len(sample)))
    removed = sum(map(len, verdicts.first.values()))
    share = 100 * removed / len(sample)
    head = f"{len(sample):,} of {count_of(total, 'document')}: {removed:,} removed ({share:.1f}%)"
    lines: list[RenderableType] = [
        Text(f"{head}, {verdicts.rewritten:,} of the others rewritten"),
        Text(),
        table,
    ]
    for name, documents in verdicts.first.items():
        if documents[:examples]:
            lines += [Text(), Text(name, style="bold")]
        for document, value in documents[:examples]:
            start = " ".join(document.text[: 4 * _FIRST].split())[:_FIRST]
            lines += [Text(f"  {_number(value)}  {document.key}"), Text(f"    {escape(start)!r}")]
    return Group(*lines)


def _row_of_rule(step: Bounds, verdicts: _Verdicts, documents: int) -> list[str]:
    """Return the row of a rule: its limits, what it removes, and percentiles of its measure."""
    values = verdicts.values[step.name]
    count = len(verdicts.first[step.name])
    alone = sum(not step.allows(value) for value in values)
    name = step.name if len(step.name) <= 29 else f"{step.name[:28]}…"
    row = [name, _limits(step), f"{count:,}", f"{100 * count / documents:.1f}%", f"{alone:,}"]
    for percentile in np.percentile(np.array(values), _PERCENTILES):
        row.append(_number(percentile))
    return row


def _limits(step: Bounds) -> str:
    least = "" if step.least == -np.inf else f"{step.least:g}"
    most = "" if step.most == np.inf else f"{step.most:g}"
    return f"{least}…{most}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
