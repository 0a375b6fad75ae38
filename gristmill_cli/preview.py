"""Commands: what rules of a recipe, or scores of models, would remove from a corpus, with examples, before a run."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from gristmill.config import load_config
from gristmill.counts import FAILED
from gristmill.errors import UsageError, require
from gristmill.io.documents import DocKey, Document
from gristmill.io.readers import read_corpus
from gristmill.steps import Batch, Processed, run_steps
from gristmill.storage.files import is_folder
from gristmill.wording import count_of
from gristmill_cli.run_check import scan_inputs
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.normalize_text import document_steps
from preprocessing.quality.bounds import Bounds, LanguageBounds
from preprocessing.quality.measures import TextMeasures
from preprocessing.quality.recipe import LANGUAGE, Recipe, load_recipe
from preprocessing.scoring.score_choice import parse_bands
from preprocessing.steps.model_score import ScoreOptions, score_steps, tables_after
from preprocessing.steps.recipe_rules import RecipeRules

_PERCENTILES = (5, 50, 95)
_RULES_SHOWN = 3  # of a language
_SCORE_PERCENTILES = (5, 25, 50, 75, 95)
_FIRST = 44  # characters of an example


def preview(
    recipe: Positional[str],
    corpus: Positional[Path | None] = None,
    documents: int = 1000,
    examples: int = 2,
    text_column: str = "text",
    seed: int = 1,
) -> Group:
    """Print what each rule of a recipe would remove from a sample of a corpus, and the distribution of its measure.

    A document counts under the first rule that it fails, in the recipe's order; "alone" counts all documents that fail
    a rule, whatever the other rules say. Reads the whole corpus, and writes nothing.

    Args:
        recipe: gopher, c4, fineweb, fineweb-en, fineweb2, or a TOML file of rules; or the TOML file of a run alone, for
            its recipe on its corpus.
        corpus: A corpus folder or file, or the TOML file of a run, whose [sources] are read as the run reads them.
        documents: Size of the sample, drawn at random from the whole corpus.
        examples: Maximum number of documents to show for each rule.
        text_column: The column or field that holds the text.
        seed: Seed of the sample.
    """
    if corpus is None:
        corpus = Path(recipe)
        recipe = _recipe_of_run(corpus)
    rules = load_recipe(recipe)
    if documents < 1:
        raise UsageError(f"--documents {documents}: expected 1 or more")
    given = read_corpus(corpus, text_column, on_malformed="skip")
    if corpus.suffix == ".toml":
        require(text_column == "text", f"--text_column has no effect with {corpus}, which names it: leave it out")
        given = _documents_of(load_config(RunConfig, ["--config", str(corpus)]))
    try:
        sample, total = _sample(given, documents, seed)
    except UsageError as error:
        if not is_folder(corpus):
            raise
        raise UsageError(
            f"{error}. Where sources differ, give the TOML file of the run in place of {corpus}"
        ) from error
    if not sample:
        raise UsageError(
            f"{corpus} has no document to preview; give a corpus with documents, --text_column NAME if their text is "
            "in another field, or the TOML file of a run in its place"
        )
    return _report(rules, sample, total, examples)


def _recipe_of_run(file: Path) -> str:
    """Return the recipe that the TOML file of a run names. Raises UsageError, with what to type, if it names none."""
    advice = f"expected RECIPE CORPUS, such as gristmill preview gopher corpus; {file} alone is"
    if file.suffix != ".toml":
        raise UsageError(f"{advice} no TOML file of a run")
    try:
        options = load_config(RunConfig, ["--config", str(file)])
    except UsageError as error:
        raise UsageError(f"{advice} no TOML file of a run that can be read ({error})") from error
    scores = f", gristmill preview-scores {file} its scores" if options.scores else ""
    require(
        bool(options.recipe),
        f"{file} names no recipe: gristmill preview gopher {file} shows what that would remove of its corpus{scores}",
    )
    return str(options.recipe)


def preview_scores(config: Positional[Path], documents: int = 1000, examples: int = 2, seed: int = 1) -> Group:
    """Print how the scores of a run would be distributed in each source, and the documents around each limit.

    Scores a sample as the run would: after normalisation, your steps and the recipe. Quantiles are those of the sample.
    Reads the whole corpus, and writes nothing.

    Args:
        config: The TOML file of the run, with a table [scores.NAME].
        documents: Size of the sample, drawn at random from the whole corpus.
        examples: Number of documents to show on each side of a limit.
        seed: Seed of the sample.
    """
    options = load_config(RunConfig, ["--config", str(config)])
    require(bool(options.scores), f"{config}: expected a table [scores.NAME], got none")
    require(documents > 0, f"--documents {documents}: expected 1 or more")
    scores = score_steps(options.scores)
    steps = document_steps(options)
    if options.recipe and options.apply.function:  # the rules stand after it, in a stage of their own
        steps.append(RecipeRules.of(options.recipe))
    sample, total = _sample(_documents_of(options), documents, seed)
    if not sample:
        raise UsageError(f"{options.corpus} has no document to preview; give a corpus with documents")
    texts = tuple(document.text for document in sample)
    batch = Batch(texts, read_field=lambda number, name: sample[number].value(name))
    done = run_steps([*steps, *scores], batch)
    head = Text(f"{len(sample):,} of {count_of(total, 'document')} drawn")
    if tables_after("copies", options.scores):
        head.append("; which of them are copies a run alone knows")
    lines: list[RenderableType] = [head, *_reasons_without_score(done, sample)]
    for step in scores:
        table = options.scores[step.score]
        positions, values = done.facts.get(step.fact, (np.empty(0, np.int64), np.empty(0, np.float32)))
        scored = list[Scored]()
        for position, value in zip(positions.tolist(), values, strict=True):
            scored.append(Scored(float(value), sample[position]))
        lines += [Text(), *_report_score(step.score, table, scored, examples)]
    return Group(*lines)


def _reasons_without_score(done: Processed, sample: Sequence[Document]) -> Iterator[Text]:
    """Yield why documents have no score, how many, and of those on which a step failed an example."""
    by_reason = Counter(filter(None, done.reasons))
    for reason, count in by_reason.most_common():
        line = Text(f"{count:,} not scored: {reason}")
        if reason.startswith(FAILED):
            number = done.reasons.index(reason)
            line.append(f", such as {sample[number].key}: {done.details[number]}")
        yield line


def _documents_of(options: RunConfig) -> Iterator[Document]:
    """Yield the documents of a run's corpus, of all sources."""
    for file in scan_inputs(options, options.corpus).files:
        for document in read_corpus(file.path, file.text_column, on_malformed="skip", reading=file.reading):
            document.key = DocKey(file.name, document.key.row)
            yield document


class Scored(NamedTuple):
    """A document and its score."""

    score: float
    document: Document


def _by_source(scored: Sequence[Scored]) -> dict[str, NDArray[np.float64]]:
    """Return the scores of each source's documents, in the order of their names."""
    scores = defaultdict[str, list[float]](list)
    for score, document in scored:
        scores[document.key.source].append(score)
    return {source: np.array(scores[source]) for source in sorted(scores)}


def _report_score(name: str, table: ScoreOptions, scored: list[Scored], examples: int) -> Iterator[RenderableType]:
    """Yield a table of a score by source, and the documents next to its limits."""
    by_source = _by_source(scored)
    shown = Table(name, box=None, pad_edge=False, collapse_padding=True)
    for column in ("documents", *_percent_signs(_SCORE_PERCENTILES), "limit", "kept"):
        shown.add_column(column, justify="right", no_wrap=True)
    limits: dict[str, float] = {}
    upper = np.inf if table.max is None else table.max
    all_values = np.array([score for score, _ in scored])
    for source, values in by_source.items():
        limits[source] = _limit_of(table, all_values if table.of == "all" else values)
        is_kept = (values >= limits[source]) & (values <= upper)
        share = _share_by_curve(table, values) if table.keep else float(is_kept.mean())
        kept = f"{100 * share:.1f}%"
        spread = [f"{value:.3g}" for value in np.percentile(values, _SCORE_PERCENTILES)]
        bounds = filter(np.isfinite, (limits[source], upper))
        limit = " to ".join(f"{bound:.3g}" for bound in bounds) or "none"
        shown.add_row(source, f"{len(values):,}", *spread, limit, kept)
    yield shown
    if table.bands:
        yield _bands_of(table, scored)
    if table.min is not None or table.quantile is not None:

        def above_limit(item: Scored) -> float:
            return item.score - limits[item.document.key.source]

        yield from _examples_at(scored, above_limit, "just below, and left out", "just above, and kept", examples)
    if table.max is not None:

        def below_max(item: Scored) -> float:
            return upper - item.score

        yield from _examples_at(scored, below_max, "just above max, and left out", "just below max", examples)


def _examples_at(
    scored: Sequence[Scored], margin: Callable[[Scored], float], left_out: str, kept: str, examples: int
) -> Iterator[RenderableType]:
    """Yield the documents next to a limit, given the margin of each: how far it is on the good side."""
    inside = list[Scored]()
    outside = list[Scored]()
    for item in scored:
        if margin(item) < 0:
            outside.append(item)
        else:
            inside.append(item)
    inside.sort(key=margin)
    outside.sort(key=margin, reverse=True)
    for title, nearest in ((left_out, outside), (kept, inside)):
        yield Text()
        yield Text(title, style="bold")
        for item in nearest[:examples]:
            yield from _example(item.score, item.document)


def _share_by_curve(table: ScoreOptions, values: NDArray[np.float64]) -> float:
    """Return which share of documents a curve keeps, on average."""
    points = np.array(table.keep)
    return float(np.interp(values, points[:, 0], points[:, 1]).mean())


def _bands_of(table: ScoreOptions, scored: list[Scored]) -> Table:
    """Return which share of each source's documents is in each band."""
    bands = parse_bands(table.bands)
    all_values = np.array([score for score, _ in scored])
    shown = Table("source", box=None, pad_edge=False, collapse_padding=True)
    for band in reversed(bands):
        shown.add_column(f"{band.name} ×{band.weight:g}", justify="right", no_wrap=True)
    for source, values in _by_source(scored).items():
        ranked = all_values if table.of == "all" else values
        limits = list[float]()
        for band in bands[1:]:
            limit = float(band.min or 0)
            if band.quantile is not None:
                limit = float(np.quantile(ranked, band.quantile))
            limits.append(limit)
        counts = np.bincount(np.searchsorted(limits, values, side="right"), minlength=len(bands))
        shares = [f"{count / len(values):.1%}" for count in counts[::-1].tolist()]
        shown.add_row(source, *shares)
    return shown


def _percent_signs(percentiles: Iterable[float]) -> list[str]:
    return [f"{percentile}%" for percentile in percentiles]


def _limit_of(table: ScoreOptions, scores: NDArray[np.float64]) -> float:
    if table.quantile is not None:
        return float(np.quantile(scores, table.quantile))
    return -np.inf if table.min is None else table.min


def _example(value: float, document: Document) -> list[RenderableType]:
    start = " ".join(document.text[: 4 * _FIRST].split())[:_FIRST]
    return [Text(f"  {_number(value)}  {document.key}"), Text(f"    {escape(start)!r}")]


def _sample(documents: Iterable[Document], size: int, seed: int) -> tuple[list[Document], int]:
    """Return documents drawn at random, each as likely, in the order of the corpus; and how many there are."""
    chosen = list[tuple[int, Document]]()
    total = 0
    draw = random.Random(seed)
    for total, document in enumerate(documents, 1):
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
    alone: Counter[str] = field(default_factory=Counter)  # documents that a rule alone would remove
    languages: dict[str, Counter[str]] = field(default_factory=dict)  # documents ("") and removed by rule, by language


def _judge(recipe: Recipe, sample: list[Document]) -> _Verdicts:
    """Apply all rules to each document of a sample."""
    names = [step.name for step in recipe.steps if isinstance(step, Bounds)]
    verdicts = _Verdicts({}, {})
    for name in names:
        verdicts.values[name] = []
        verdicts.first[name] = []
    splitter = recipe.new_splitter()
    for document in sample:
        url = ""
        if recipe.url_field:
            url = str(document.value(recipe.url_field) or "")
        steps, stop_hashes, language, score = recipe.rules_for(document.text, *recipe.language_of(document.value))
        of_language = verdicts.languages.setdefault(language, Counter())
        of_language[""] += 1
        if steps is None:
            verdicts.first.setdefault(LANGUAGE, []).append((document, score))
            of_language[LANGUAGE] += 1
            continue
        measures = TextMeasures(document.text, splitter.of(language), url, stop_hashes)
        is_removed = False
        for step in steps:
            if not isinstance(step, Bounds):
                changed, _ = step.rewrite(measures.text)
                if changed != measures.text:
                    measures = measures.of(changed)
                continue
            value = step.value(measures)
            verdicts.values[step.name].append(value)
            is_allowed = step.allows(value)
            verdicts.alone[step.name] += not is_allowed
            if not is_removed and not is_allowed:
                is_removed = True
                of_language[step.name] += 1
                verdicts.first[step.name].append((document, value))
        if not is_removed and measures.text != document.text:
            verdicts.rewritten += 1
    return verdicts


def _report(recipe: Recipe, sample: list[Document], total: int, examples: int) -> Group:
    """Return what the rules would remove from a sample of `total` documents, for a terminal."""
    verdicts = _judge(recipe, sample)
    table = Table("rule", box=None, pad_edge=False, collapse_padding=True)
    for name in ("keeps", "removed", "share", "alone", *_percent_signs(_PERCENTILES)):
        table.add_column(name, justify="right", no_wrap=True)
    if recipe.languages:
        count = len(verdicts.first.get(LANGUAGE, []))
        table.add_row(LANGUAGE, "by language", f"{count:,}", f"{100 * count / len(sample):.1f}%", f"{count:,}")
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
    if recipe.languages:
        lines += [Text(), _table_of_languages(verdicts)]
    for name, documents in verdicts.first.items():
        if documents[:examples]:
            lines += [Text(), Text(name, style="bold")]
        for document, value in documents[:examples]:
            lines += _example(value, document)
    return Group(*lines)


def _table_of_languages(verdicts: _Verdicts) -> Table:
    """Return how many documents of each language there are, how many go, and which rules remove most of them."""
    table = Table("language", box=None, pad_edge=False, collapse_padding=True)
    for name in ("documents", "removed", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("most by")
    for language, counts in sorted(verdicts.languages.items(), key=lambda item: (-item[1][""], item[0])):
        documents = counts.pop("")
        removed = sum(counts.values())
        rules = ", ".join(f"{rule} {count:,}" for rule, count in counts.most_common(_RULES_SHOWN))
        table.add_row(language or "none", f"{documents:,}", f"{removed:,}", f"{100 * removed / documents:.1f}%", rules)
    return table


def _row_of_rule(step: Bounds, verdicts: _Verdicts, documents: int) -> list[str]:
    """Return the row of a rule: its limits, what it removes, and percentiles of its measure."""
    values = verdicts.values[step.name]
    count = len(verdicts.first[step.name])
    name = step.name
    if len(name) > 29:
        name = f"{name[:28]}…"
    row = [name, _limits(step), f"{count:,}", f"{100 * count / documents:.1f}%", f"{verdicts.alone[step.name]:,}"]
    if not values:
        return row
    for percentile in np.percentile(np.array(values), _PERCENTILES):
        row.append(_number(percentile))
    return row


def _limits(step: Bounds) -> str:
    if isinstance(step, LanguageBounds):
        return "by language"
    low = "" if step.min == -np.inf else f"{step.min:g}"
    high = "" if step.max == np.inf else f"{step.max:g}"
    return f"{low}…{high}"


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
