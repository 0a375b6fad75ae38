"""Command: what each rule of a recipe would remove from a corpus, with examples, before anything runs."""

import random
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
    """Documents drawn at random, each as likely, in the order of the corpus; and how many there are."""
    chosen = list[tuple[int, Document]]()
    total = 0
    draw = random.Random(seed)
    for total, document in enumerate(read_corpus(corpus, text_column, on_malformed="skip"), 1):
        if len(chosen) < size:
            chosen.append((total, document))
        elif (place := draw.randrange(total)) < size:
            chosen[place] = (total, document)
    return [document for _, document in sorted(chosen, key=lambda pair: pair[0])], total


def _report(recipe: Recipe, sample: list[Document], total: int, examples: int) -> Group:
    splitter = WordSplitter()
    bounds = [step for step in recipe.steps if isinstance(step, Bounds)]
    values: dict[str, list[float]] = {step.name: [] for step in bounds}
    first: dict[str, list[tuple[Document, float]]] = {step.name: [] for step in bounds}
    rewritten = 0
    for document in sample:
        url = str(document.value(recipe.url_field) or "") if recipe.url_field else ""
        measures = TextMeasures(document.text, splitter, url)
        removed = False
        for step in recipe.steps:
            if not isinstance(step, Bounds):
                changed, _ = step.rewrite(measures.text)
                measures = measures if changed == measures.text else measures.of(changed)
                continue
            value = step.value(measures)
            values[step.name].append(value)
            if not removed and not step.allows(value):
                removed = True
                first[step.name].append((document, value))
        rewritten += not removed and measures.text != document.text
    table = Table("rule", box=None, pad_edge=False, collapse_padding=True)
    for name in ("keeps", "removed", "share", "alone", *(f"{p}%" for p in _PERCENTILES)):
        table.add_column(name, justify="right", no_wrap=True)
    for step in bounds:
        found = np.array(values[step.name])
        count = len(first[step.name])
        alone = sum(not step.allows(value) for value in values[step.name])
        spread = (_number(value) for value in np.percentile(found, _PERCENTILES))
        share = f"{100 * count / len(sample):.1f}%"
        name = step.name if len(step.name) <= 29 else f"{step.name[:28]}…"
        table.add_row(name, _limits(step), f"{count:,}", share, f"{alone:,}", *spread)
    lost = sum(map(len, first.values()))
    head = f"{len(sample):,} of {count_of(total, 'document')}: {lost:,} removed ({100 * lost / len(sample):.1f}%)"
    lines: list[RenderableType] = [Text(f"{head}, {rewritten:,} of the others rewritten"), Text(), table]
    for name, found_documents in first.items():
        if found_documents[:examples]:
            lines += [Text(), Text(name, style="bold")]
        for document, value in found_documents[:examples]:
            start = " ".join(document.text[: 4 * _FIRST].split())[:_FIRST]
            lines += [Text(f"  {_number(value)}  {document.key}"), Text(f"    {escape(start)!r}")]
    return Group(*lines)


def _limits(step: Bounds) -> str:
    least = "" if step.least == -np.inf else f"{step.least:g}"
    most = "" if step.most == np.inf else f"{step.most:g}"
    return f"{least}…{most}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
